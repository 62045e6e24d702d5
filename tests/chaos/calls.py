"""The calls of `log` according to the ledgers, where their rows lie on the x axis, and what a number in a row means.

It means a cell, the ranks whose numbers it contains, and the call that owns it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ledger import Entry


@dataclass(frozen=True, eq=False)
class Call:
    rank: int  # global rank
    number: int  # number of earlier calls of this rank in the session, in the order in which they were recorded
    session: int
    step: int | None  # the step that was passed; `None` for none
    axes: Mapping[str, float]  # values of the user's axis
    cells: Mapping[str, tuple[int, float]]  # cell and number by name
    weight: float  # the weight that was passed, or 1
    pid: int  # the process, which may be a child of the rank's
    began: float  # when it was recorded
    ended: float  # when it returned; infinity if it may not have
    # where its row may lie on the x axis: one place, unless other calls of the rank overlapped with it
    places: set[int] = field(default_factory=set)

    @property
    def is_certain(self) -> bool:
        return self.ended < math.inf

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        return f"call {self.number} of rank {self.rank}{at} {[*self.cells, *self.axes]}"


@dataclass(frozen=True)
class Contribution:
    value: float
    call: Call

    @property
    def weight(self) -> float:
        return self.call.weight

    @property
    def is_certain(self) -> bool:
        return self.call.is_certain


Cells = dict[int, dict[int, Contribution]]
"""The contributions to one name, by cell and rank."""


def calls_of(entries: Sequence[Entry]) -> dict[int, list[Call]]:
    """Return the calls of all ranks by session, in the order in which they were recorded."""
    # After SIGTERM the session ends, so what a signal handler logs meanwhile is dropped.
    ends = {entry["pid"]: entry["at"] for entry in entries if entry["event"] == "fault" and entry["kind"] == "term"}
    returned = {
        (entry["pid"], entry["number"]): entry["at"]
        for entry in entries
        if entry["event"] == "done" and entry["at"] < ends.get(entry["pid"], math.inf)
    }
    main_pids = {entry["rank"]: entry["pid"] for entry in reversed(entries) if entry["event"] == "opened"}
    found: dict[int, list[Call]] = defaultdict(list)
    for entry in entries:
        if entry["event"] == "log":
            call = Call(
                rank=entry["rank"],
                number=entry["call"],
                session=entry["session"],
                step=entry["step"],
                axes=entry["axes"],
                cells={name: (cell, value) for name, (cell, value) in entry["cells"].items()},
                weight=1.0 if entry["weight"] is None else entry["weight"],
                pid=entry["pid"],
                began=entry["at"],
                ended=returned.get((entry["pid"], entry["number"]), math.inf),
            )
            found[call.session].append(call)
    for calls in found.values():
        for rank, main_pid in main_pids.items():
            _place([call for call in calls if call.rank == rank], main_pid)
    return found


def cells_of(calls: Iterable[Call]) -> dict[str, Cells]:
    """Return the contributions of calls, by name, cell and rank."""
    found: dict[str, Cells] = defaultdict(lambda: defaultdict(dict))
    for call in calls:
        for name, (cell, value) in call.cells.items():
            found[name][cell][call.rank] = Contribution(value, call)
    return found


def differing_axes(calls: Iterable[Call]) -> set[str]:
    """Return the axes whose values differ between calls that contribute to the same cell: a message says so."""
    return {
        axis
        for cells in cells_of(calls).values()
        for ranks in cells.values()
        for axis in {axis for given in ranks.values() for axis in given.call.axes}
        if len({given.call.axes.get(axis) for given in ranks.values()}) > 1
    }


def uneven_names(calls: Iterable[Call]) -> set[str]:
    """Return the names that ranks logged unequally often without a step: a message says so at the end."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for call in calls:
        for name in call.cells if call.step is None else ():
            counts[name][call.rank] += 1
    return {name for name, of_name in counts.items() if len(set(of_name.values())) > 1}


def _place(calls: Sequence[Call], main_pid: int) -> None:
    """Determine the places of one rank's calls.

    A place is the step that was passed, else the last one, else the number of earlier calls. Calls that overlapped (of
    threads and signal handlers) have an unknown order, and those of a child are taken at any time after they were
    made; a child's steps do not apply to other calls. All of their places are right.
    """
    for call in calls:
        if call.step is not None:
            call.places.add(call.step)
            continue
        before = [other for other in calls if other.ended < call.began and other.pid == main_pid]
        if call.pid != main_pid:
            beside = [other for other in calls if other is not call and other not in before]
        else:
            beside = [
                other
                for other in calls
                if other is not call
                and other.began < call.ended
                and (other.ended >= call.began or other.pid != main_pid)
            ]
        leading = [other for other in before if other.step is not None]
        latest = max((other.began for other in leading), default=-math.inf)
        call.places.update(other.step for other in leading if other.step is not None and other.ended >= latest)
        call.places.update(other.step for other in beside if other.step is not None and other.pid == main_pid)
        if not leading:
            call.places.update(range(len(before), len(before) + len(beside) + 1))


# --- numbers in rows --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meaning:
    """The meaning of a number: its cell, its contributors, and the calls that may own it."""

    cell: int
    ranks: frozenset[int]
    owners: tuple[Call, ...]


@dataclass(frozen=True, eq=False)
class Column:
    name: str  # name that the ranks logged
    column: str  # name in the rows
    reduction: str  # how the numbers of several ranks are reduced; `"own"` for numbers of one rank only
    cells: Cells  # the contributions that are reduced
    has_faults: bool  # whether ranks may be missing

    def meaning(self, value: Any) -> Meaning | None:
        """Return the meaning of a number, or a text; `None` if it is not the reduction of any ranks' numbers."""
        number = float(value.rpartition(" ")[2] if isinstance(value, str) else value)
        at = bisect.bisect(self._numbers, number)
        nearest = min(self._numbers[max(0, at - 1) : at + 1], key=lambda each: abs(each - number), default=math.inf)
        if not math.isclose(nearest, number, rel_tol=1e-6):  # some had single precision
            return None
        cell, ranks = self._known[nearest]
        lowest = sorted(ranks)
        if self.reduction != "max" or not self.has_faults:  # a maximum does not tell whether lower ranks are in it
            lowest = lowest[:1]
        return Meaning(cell, ranks, tuple(self.cells[cell][rank].call for rank in lowest))

    @property
    def is_own(self) -> bool:
        """Whether it has only the writer's own values: texts, and all under its label."""
        return self.reduction == "own"

    @property
    def identifies_ranks(self) -> bool:
        """Whether a number identifies its contributors."""
        return self.reduction not in ("min", "max")

    @cached_property
    def _known(self) -> dict[float, tuple[int, frozenset[int]]]:
        """Cell and contributors by number: of several possibilities the one with the most contributors."""
        known: dict[float, tuple[int, frozenset[int]]] = {}
        largest = max((len(ranks) for ranks in self.cells.values()), default=0)
        for size in range(largest, 0, -1):
            for cell, ranks in self.cells.items():
                for chosen in itertools.combinations(sorted(ranks), size):
                    number = reduced(self.reduction, [ranks[rank] for rank in chosen])
                    known.setdefault(number, (cell, frozenset(chosen)))
        return known

    @cached_property
    def _numbers(self) -> list[float]:
        return sorted(self._known)


def reduced(reduction: str, given: Sequence[Contribution]) -> float:
    values = [each.value for each in given]
    if reduction in ("own", "first"):
        return values[0]
    if reduction == "mean":
        return math.fsum(each.weight * each.value for each in given) / math.fsum(each.weight for each in given)
    if reduction == "sum":
        return math.fsum(values)
    return min(values) if reduction == "min" else max(values)


def deviation(given: Sequence[Contribution]) -> float:
    mean = reduced("mean", given)
    squares = math.fsum(each.weight * (each.value - mean) ** 2 for each in given)
    return math.sqrt(squares / math.fsum(each.weight for each in given))
