"""Detection of the rank that delays the others, from rows with busy times of all ranks (`session.sections`). Pure.

Each row contains the largest share of the time in which a rank was busy, that rank, and the mean share of the others. A
rank is reported if it was the busiest one in 18 of the last 20 rows, and at the median of these rows busier than the
others by at least a tenth. Among equally fast ranks, the busiest one changes from row to row: that the same of 2 ranks
is the busiest in 18 of 20 rows has a probability of 0.04 %, and it then differs from the other by less than a tenth,
unless times vary a lot.

Where no section is marked as one in which ranks wait, all ranks are equally busy. `findings` then says in words which
rank takes longest for which section, by the same rule over all rows, and which section seems to wait: where one rank
takes less than the others by about the time that it takes longer elsewhere.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dist_wandb.settings.reduction import BUSY, STEP, TIMES

RANK, EXCESS = f"{TIMES}straggler_rank", f"{TIMES}straggler_excess"
_ROWS = 20
_OFTEN = 18  # of these rows
_LEAST = 0.1  # of the others' time
_LEAST_OF_STEP = 0.05
_MOST_FINDINGS = 3
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


def findings(timings: Mapping[str, Timing], ranks: int) -> list[str]:
    """Say which rank takes longest for which section if no section is marked as one that waits, as the head says.

    `timings` are by name, with those of ``time/step`` and ``time/busy``. Of ``time/straggler_rank`` there are the
    counts, and if it is known by how much the named ranks were busy longer, the sums of these times as means.
    """
    step, busy, named = (timings.get(name, Timing()) for name in (STEP, BUSY, RANK))
    for rank, times in named.counts.most_common(1):
        rows = max(step.rows, named.rows)
        if times * _RARELY >= rows:
            more = f", busy {named.mean / named.rows:.5g} s longer than the others" if named.mean else ""
            return [f"rank {rank} held the others up in {times} of {rows} rows ({RANK}){more}"]
    if ranks < 2 or busy.rows < _OFTEN or has_marked(timings):  # noqa: PLR2004
        return []
    sections = {name: one for name, one in timings.items() if name not in _NO_SECTIONS and one.counts}
    share = ranks / (ranks - 1)
    rise = {name: (one.largest - one.mean) * share for name, one in sections.items()}  # of one rank above the others
    fall = {name: (one.mean - one.smallest) * share for name, one in sections.items()}  # of one rank below the others
    slow: dict[str, int] = {}
    for name, one in sections.items():
        (rank, times), *_ = one.counts.most_common(1)
        least = max(_LEAST * (one.largest - rise[name]), _LEAST_OF_STEP * step.mean)
        if times * _ROWS >= one.rows * _OFTEN and rise[name] > least:
            slow[name] = rank
    found = []
    for name in sorted(slow, key=rise.__getitem__, reverse=True)[:_MOST_FINDINGS]:
        one, rank = sections[name], slow[name]
        seconds, others = (f"{total / one.rows:.3g} s" for total in (one.largest, one.largest - rise[name]))
        where = f"{name} in {one.counts[rank]} of {one.rows} rows"
        found.append(f"rank {rank} has the largest {where}: {seconds}, the others {others}")

    def seems_to_wait(name: str) -> bool:
        least = [rise[other] / 2 for other, rank in slow.items() if slow.get(name) != rank]
        return bool(least) and fall[name] > max(min(least), 0.99 * rise[name])

    if waiting := sorted(filter(seems_to_wait, sections)):
        found.append(
            f"the ranks seem to wait for each other in {' or '.join(waiting)}: pass waits=True to timed there, and the "
            "rows name the rank that holds up the others"
        )
    return found
