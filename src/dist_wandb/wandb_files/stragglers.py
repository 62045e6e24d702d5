"""Detection of the rank that delays the others, from rows with busy times of all ranks (`session.sections`). Pure.

Each row contains the largest share of the time in which a rank was busy, that rank, and the mean share of the others. A
rank is reported if it was the busiest one in 18 of the last 20 rows, and at the median of these rows busier than the
others by at least a tenth. Among equally fast ranks, the busiest one changes from row to row: that the same of 2 ranks
is the busiest in 18 of 20 rows has a probability of 0.04 %, and it then differs from the other by less than a tenth,
unless times vary a lot.

Where no section is marked as one in which ranks wait, all ranks are equally busy. `findings` then says in words which
ranks take longest for which section, over all rows, and which section seems to wait: where one rank takes less than the
others by about the time that it takes longer elsewhere. If some section is marked, it says which ranks are busiest, as
rows name none of several slow ranks, such as those of a slow node.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dist_wandb.job.ranges import named
from dist_wandb.settings.reduction import BUSY, STEP, TIMES

RANK, EXCESS = f"{TIMES}straggler_rank", f"{TIMES}straggler_excess"
_ROWS = 20
_OFTEN = 18  # of these rows
_LEAST = 0.1  # of the others' time
_LEAST_OF_STEP = 0.05
_MOST_FINDINGS = 3
_ONE_IN = 2000  # the probability at which what equally fast ranks do is taken for a difference between them
_ALIKE = 0.75  # of half of the ranks, either half may be the one that waits: both differ by about as much
_OFTEN_SLOW = 0.4  # of the rows: at least in these, slow ranks have the largest time not by chance
_NO_SECTIONS = frozenset({STEP, BUSY, RANK})
_MORE_THAN_BUSY = 1.1
_RARELY = 20  # a rank named in less than one of this number of rows is not reported for the run


class Stragglers:
    """The last rows with busy times."""

    def __init__(self) -> None:
        # the busiest rank, and how much longer it was busy, as a fraction of the others' time
        self._rows: deque[tuple[int, float]] = deque(maxlen=_ROWS)
        self._more = 0.0

    def add(self, busiest: int, largest: float, others: float) -> None:
        """Add the next row: the busiest rank, the share of the time that it was busy, and the mean of the others."""
        self._more = largest - others
        self._rows.append((busiest, self._more / others if others > 0 else float(self._more > 0)))

    def detect(self, seconds: float | None) -> dict[str, float]:  # the mean time that the row covers, if known
        """Return the straggler of the last row, if any, and how many seconds longer than the others it was busy."""
        if seconds is None or not self._rows:
            return {}
        busiest, _ = self._rows[-1]
        times = sum(rank == busiest for rank, _ in self._rows)
        if times < _OFTEN or statistics.median(by for _, by in self._rows) < _LEAST:
            return {}
        return {RANK: busiest, EXCESS: self._more * seconds}


@dataclass
class Timing:
    """The times of one section, summed over rows."""

    counts: Counter[int] = field(default_factory=Counter)  # rows by the rank with the largest time
    rows: int = 0
    largest: float = 0.0  # of the largest times, in seconds
    mean: float = 0.0  # of the means over ranks
    smallest: float = 0.0  # of the smallest times

    def add(self, rank: int, largest: float, mean: float, smallest: float) -> None:
        self.counts[rank] += 1
        self.rows += 1
        self.largest, self.mean, self.smallest = self.largest + largest, self.mean + mean, self.smallest + smallest


def has_marked(timings: Mapping[str, Timing]) -> bool:
    """Return whether a section is marked as one in which ranks wait: its time is not in the busy time.

    Nested sections are measured twice; where there is nothing beside the busy time, that is all.
    """
    step, busy = (timings.get(name, Timing()) for name in (STEP, BUSY))
    measured = sum(one.mean for name, one in timings.items() if name not in _NO_SECTIONS)
    seconds = step.mean * busy.mean / max(busy.rows, 1)
    return busy.rows > 0 and measured > _MORE_THAN_BUSY * seconds and step.mean - seconds > _LEAST_OF_STEP * step.mean


def slow_ranks(timing: Timing, ranks: int) -> list[int]:
    """Return the ranks, at most half, of which one has the largest time in so many rows that it cannot be chance.

    With equally fast ranks, one of some `many` has it in a `share` of the rows or more with a probability of at most
    exp(-rows * D), where D is the relative entropy of `share` and `many` / `ranks` (Chernoff's bound). The ranks for
    which this is least likely, given how many others there might be, are slow if they are so in enough of the rows.
    """
    times, most = 0, timing.counts.most_common(ranks // 2)
    least_likely, slow, is_often = math.log(_ONE_IN), 0, False
    for many, (_, rows) in enumerate(most, 1):
        times += rows
        share, expected = min(times / timing.rows, 1.0), many / ranks
        rest = (1 - share) * math.log((1 - share) / (1 - expected)) if share < 1 else 0.0
        # The logarithm of the number of sets of so many ranks. The number itself has as many digits as there are ranks.
        sets = math.lgamma(ranks + 1) - math.lgamma(many + 1) - math.lgamma(ranks - many + 1)
        unlikely = timing.rows * (share * math.log(share / expected) + rest) - sets
        if share > expected and unlikely > least_likely:
            least_likely, slow, is_often = unlikely, many, share - expected >= _OFTEN_SLOW * (1 - expected)
    return sorted(rank for rank, _ in most[:slow]) if is_often else []


def findings(timings: Mapping[str, Timing], ranks: int) -> list[str]:
    """Say which ranks take longest, and if no section is marked as one that waits, where they seem to: see the head.

    `timings` are by name, with those of ``time/step`` and ``time/busy``. Of ``time/straggler_rank`` there are the
    counts, and if it is known by how much the named ranks were busy longer, the sums of these times as means.
    """
    step, busy, held = (timings.get(name, Timing()) for name in (STEP, BUSY, RANK))
    for rank, times in held.counts.most_common(1):
        rows = max(step.rows, held.rows)
        if times * _RARELY >= rows:
            more = f", busy {held.mean / held.rows:.5g} s longer than the others" if held.mean else ""
            return [f"rank {rank} held the others up in {times} of {rows} rows ({RANK}){more}"]
    if ranks < 2 or busy.rows < _OFTEN:  # noqa: PLR2004
        return []
    if all(one.largest == one.smallest for one in timings.values()):
        return [f"only {named(busy.counts)} has logged timings, so nothing is known of the others: log on all ranks"]
    # A unit may have fewer ranks than the job, and each takes longest somewhere: the others wait for the slow ones.
    ranks = min(ranks, len({rank for one in timings.values() for rank in one.counts}))
    is_marked = has_marked(timings)
    wanted = {BUSY} if is_marked else timings.keys() - _NO_SECTIONS
    sections = {name: one for name, one in timings.items() if name in wanted and one.counts}
    slow = {name: they for name, one in sections.items() if (they := slow_ranks(one, ranks))}
    rise: dict[str, float] = {}  # of the slow ranks, or of one, above the others
    for name, one in sections.items():
        many = len(slow.get(name, ())) or 1
        rise[name] = (one.largest - one.mean) * ranks / max(ranks - many, 1)
        least = max(_LEAST * (one.largest - rise[name]), _LEAST_OF_STEP * (one.rows if is_marked else step.mean))
        if rise[name] <= least:
            slow.pop(name, None)

    def seems_to_wait(name: str) -> bool:
        others = [(rise[other], len(slowest)) for other, slowest in slow.items() if slow.get(name) != slowest]
        below = (sections[name].mean - sections[name].smallest) * ranks
        # As many as are slow elsewhere wait less here.
        return any(below / (ranks - many) > max(more / 2, _ALIKE * rise[name]) for more, many in others)

    waiting = sorted(filter(seems_to_wait, sections))
    found: list[str] = []
    causes = [name for name in slow if name not in waiting] or slow
    for name in sorted(causes, key=rise.__getitem__, reverse=True)[:_MOST_FINDINGS]:
        one, unit = sections[name], "" if is_marked else " s"
        seconds, others = (f"{total / one.rows:.3g}{unit}" for total in (one.largest, one.largest - rise[name]))
        where = f"{name} in {sum(one.counts[rank] for rank in slow[name])} of {one.rows} rows"
        has = "has" if len(slow[name]) == 1 else "have"
        found.append(f"{named(slow[name])} {has} the largest {where}: {seconds}, the others {others}")
    if waiting:
        found.append(
            f"the ranks seem to wait for each other in {' or '.join(waiting)}: pass waits=True to timed there, to see "
            "who holds up the others"
        )
    return found
