"""Cells that wait, and rows that were written. Pure, and equal on all ranks.

Rows that were written, and to which some rank of the unit may still add, are remembered (`Memory`) as plain tuples of
texts, numbers and bytes, which the garbage collector does not track. The oldest are forgotten. What is kept of these is
the largest step, or count, of each name: later values for them are too late.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.calls import Key, Names
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import Lanes, Number

Owner = tuple[int, int]
"""A rank of the unit, and how many of its calls the others had taken before this one: a call, and its row."""

_STALE_NOTED = 65_536  # names and occurrences for which the largest forgotten step is kept
_LACKS = 7  # where a stored row has the ranks that it lacks
_MOST_SETS = 4_096  # sets of ranks that are kept, so that equal ones are one object


class Row(NamedTuple):
    """A row to be written."""

    names: Names  # in the order of its owner's call
    occurrences: Sequence[int]  # of each name, as in `Key`
    step: int | None  # the step that the user gave
    x: int  # its position, as in `Call`
    lanes: Lanes  # of all ranks that contributed
    axes: Mapping[str, float]  # the user's x axes, of the lowest rank that gives one
    ranks: Sequence[int]  # how many contributed to each name
    missing: int = 0  # ranks that usually log one of the names, but left without notice, or were given up
    corrects: bool = False  # whether it replaces a row that was written before
    own: Sequence[Any] = ()  # what this rank alone keeps for it: one item for each of its calls
    serial: int = 0  # how many calls had been taken when it was opened: the order of the calls, not of writing
    joined: Sequence[int] = ()  # and when ranks contributed last to each name; empty: at once, or it was written before

    def cells(self) -> list[Key]:
        return [Key(name, self.step, number) for name, number in zip(self.names, self.occurrences, strict=True)]


class Memory:
    """Rows that were written."""

    def __init__(self, size: int, most: int) -> None:
        self.size: int = size  # number of ranks of the unit
        self._most = most  # cells that are kept
        self._count = 0  # cells of all rows
        self._rows: dict[Owner, tuple[Any, ...]] = {}  # the oldest first
        self.index: dict[tuple[str, int | None, int], Owner] = {}  # cells to which ranks may add
        self._stale: dict[tuple[str, int], int] = {}  # the largest forgotten step, by name and occurrence

    def add(self, owner: Owner, row: Row, ranks: Sequence[Ranks], lacks: Sequence[Ranks]) -> None:
        """Remember a row, unless all ranks of the unit have contributed to all of its cells.

        For each cell, `ranks` have contributed, and it lacks others.
        """
        is_partial = False
        for key, those in zip(row.cells(), ranks, strict=True):
            if len(those) < self.size:
                self.index[key.name, key.step, key.occurrence] = owner
                is_partial = True
        if not is_partial:
            return
        place = row.names, tuple(row.occurrences), row.step, row.x, tuple(row.axes.items()), row.serial
        sets = tuple(map(_as_tuple, ranks)), tuple(map(_as_tuple, lacks))
        self._rows[owner] = (*place, *sets, *(array("d", lane).tobytes() for lane in row.lanes))
        self._count += len(row.names)

    def __contains__(self, row: Owner) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[Owner]:
        return iter(list(self._rows))

    def row(self, owner: Owner) -> tuple[Row, list[Ranks], list[Ranks]]:
        """Return a row, the ranks that have contributed to each of its cells, and those that each lacks."""
        names, occurrences, step, x, axes, serial, ranks, lacks, sums, maxima = self._rows[owner]
        lanes = [*memoryview(sums).cast("d")], [*memoryview(maxima).cast("d")]
        ranks, lacks = ([frozenset(one) for one in those] for those in (ranks, lacks))
        return Row(names, occurrences, step, x, lanes, dict(axes), (*map(len, ranks),), serial=serial), ranks, lacks

    def pop(self, owner: Owner) -> tuple[Row, list[Ranks], list[Ranks]]:
        row, ranks, lacks = self.row(owner)
        for key in row.cells():
            if self.index.get(key) == owner:
                del self.index[key]
        del self._rows[owner]
        self._count -= len(ranks)
        return row, ranks, lacks

    def ranks_of(self, key: Key) -> Ranks | None:
        """Return the contributors to a cell, if some rank may add to it."""
        owner = self.index.get(key)
        if owner is None:
            return None
        names, *_, ranks, _, _, _ = self._rows[owner]
        return frozenset(ranks[names.index(key.name)])

    def flagged_for(self, ranks: Ranks) -> list[Owner]:
        """Return the rows that are flagged for these ranks only."""
        lacks = [(owner, {*chain(*row[_LACKS])}) for owner, row in self._rows.items() if any(row[_LACKS])]
        return [owner for owner, missing in lacks if missing <= ranks]

    def is_stale(self, key: Key) -> bool:
        """Return whether a cell may have been forgotten, because one at its step or later was."""
        where, value = _place(*key)
        return value <= self._stale.get(where, value - 1)

    def forget(self, names: Collection[str]) -> None:
        """Forget the oldest rows beyond the limit, but keep at least two for each name."""
        most = max(self._most, 2 * len(names))
        while self._count > most:
            for key in self.pop(next(iter(self._rows)))[0].cells():
                where, value = _place(*key)
                self._stale[where] = max(value, self._stale.pop(where, value))
            while len(self._stale) > _STALE_NOTED:
                del self._stale[next(iter(self._stale))]


@lru_cache(maxsize=_MOST_SETS)
def _as_tuple(ranks: Ranks) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _place(name: str, step: int | None, occurrence: int) -> tuple[tuple[str, int], int]:
    """Return the name and occurrence of a cell, and its step; without a step, the occurrence stands for it."""
    return ((name, -1), occurrence) if step is None else ((name, occurrence), step)


class Known(NamedTuple):
    """A call that owns cells."""

    step: int | None
    x: int
    axes: Mapping[str, float]
    keys: Sequence[Key]  # its cells


@dataclass(slots=True)
class Cell:
    """The state of a cell."""

    serial: int  # how many calls had been taken when it was opened
    born: int  # round in which it was opened, or opened again
    number: Number = Number()  # noqa: RUF009  # immutable
    ranks: Ranks = NOBODY  # those that contributed
    calls: dict[int, int] = field(default_factory=dict)  # by rank: which of its calls, where that is known
    owner: Owner = (NEVER, NEVER)
    row: Owner | None = None  # the owner of the row in which it stands
    shown: Ranks | None = None  # those that had contributed when it was written last
    at: Owner | None = None  # the row in which it was written last
    lacks: Ranks = NOBODY  # those that were given up, or are lost
    flagged: bool = False  # when it was written last
    stale: bool = False  # an earlier cell of this key may have been forgotten
    joined: int = 0  # how many calls had been taken when ranks contributed last; unknown of one that is remembered
