"""Which cells stand together in a row: while they wait, and once the row was written. Pure, and equal on all ranks.

The *owner* of a cell is the call of the lowest rank that contributed to it. A row holds the cells of one owner's call,
and what a higher rank adds to it (`_homes`): what its call has besides cells of calls that stand in this one row, or,
with a step, after such a cell. It does not need an identity of its own.

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
from dist_wandb.exchange.protocol.lanes import Lanes, Number, number_at

Owner = tuple[int, int]
"""A rank of the unit, and how many of its calls the others had taken before this one: a call, and its row."""

_STALE_NOTED = 65_536  # names and occurrences for which the largest forgotten step is kept
_LACKS = 7  # where a stored row has the ranks that it lacks
_MOST_SETS = 4_096  # sets of ranks that are kept, so that equal ones are one object


class Remembered(NamedTuple):
    """A row that was written."""

    owner: Owner
    names: Names
    occurrences: Sequence[int]
    step: int | None
    x: int
    axes: Mapping[str, float]
    serial: int
    ranks: Sequence[Ranks]  # the contributors to each cell
    lacks: Sequence[Ranks]  # those that were missing of each cell
    lanes: Lanes

    @property
    def keys(self) -> list[Key]:
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

    def add(self, row: Remembered) -> None:
        """Remember a row, unless all ranks of the unit have contributed to all of its cells."""
        owner, names, occurrences, step, x, axes, serial, ranks, lacks, (sums, maxima) = row
        is_partial = False
        for name, occurrence, those in zip(names, occurrences, ranks, strict=True):
            if len(those) < self.size:
                self.index[name, step, occurrence] = owner
                is_partial = True
        if not is_partial:
            return
        plain = array("d", sums).tobytes(), array("d", maxima).tobytes()
        sets = tuple(map(_as_tuple, ranks)), tuple(map(_as_tuple, lacks))
        self._rows[owner] = (names, tuple(occurrences), step, x, tuple(axes.items()), serial, *sets, *plain)
        self._count += len(names)

    def __contains__(self, row: Owner) -> bool:
        return row in self._rows

    def __iter__(self) -> Iterator[Remembered]:
        return map(self._row, list(self._rows))

    def _row(self, owner: Owner) -> Remembered:
        names, occurrences, step, x, axes, serial, ranks, lacks, sums, maxima = self._rows[owner]
        lanes = [*memoryview(sums).cast("d")], [*memoryview(maxima).cast("d")]
        ranks, lacks = ([frozenset(one) for one in those] for those in (ranks, lacks))
        return Remembered(owner, names, occurrences, step, x, dict(axes), serial, ranks, lacks, lanes)

    def pop(self, owner: Owner) -> Remembered:
        row = self._row(owner)
        for key in row.keys:
            if self.index.get(key) == owner:
                del self.index[key]
        del self._rows[owner]
        self._count -= len(row.ranks)
        return row

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
            for key in self.pop(next(iter(self._rows))).keys:
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


class Placing:
    """Cells and their rows."""

    def __init__(self) -> None:
        self.cells: dict[Key, Cell] = {}
        self.rows: dict[Owner, dict[str, Key]] = {}  # the cells of each row, by name
        self.open: dict[Owner, None] = {}  # rows with something that is not written, in the order in which they came
        self.calls: dict[Owner, Known] = {}  # those that own cells, or did, or have x axes
        self.by_name: dict[str, dict[Key, None]] = {}  # the cells of open rows
        self.checked: int = NEVER  # the version of the ranks as of which all open rows were checked

    def enter(self, call: Owner, known: Known, ranks: Ranks, usual: Mapping[str, Ranks]) -> None:
        """Add a call of some ranks to its cells, which are open, and find the rows of all cells that it concerns."""
        cells = self.cells
        self.calls[call] = known
        concerned = dict.fromkeys(known.keys)
        for key in known.keys:
            cell = cells[key]
            cell.ranks |= ranks
            cell.calls[call[0]] = call[1]
            if cell.row is not None:  # what stands beside it may have another home now
                other = self.calls.get(cell.owner)
                concerned.update((one, None) for one in (other.keys if other else ()) if one in cells)
                concerned.update(dict.fromkeys(self.rows[cell.row].values()))
            if cell.owner[0] == NEVER or call[0] < cell.owner[0]:
                cell.owner = call
        of_owner: dict[Owner, list[Key]] = {}
        for key in concerned:
            of_owner.setdefault(cells[key].owner, []).append(key)
        for owner in sorted(of_owner):  # a row of lower ranks is complete when others join it
            homes = self._homes(owner, usual) if owner in self.calls else {}
            for key in of_owner[owner]:
                self._place(key, cells[key], homes.get(key) or cells[key].row or call)
        if call not in of_owner and not known.axes:
            del self.calls[call]

    def with_axes(self, row: Owner) -> Known:
        """Return the call of a row's owner, with x axes that only the calls of higher ranks have."""
        for call in sorted({call for key in self.rows[row].values() for call in self.cells[key].calls.items()}):
            known, other = self.calls[row], self.calls.get(call)
            if other is not None and not other.axes.keys() <= known.axes.keys():
                self.calls[row] = known._replace(axes={**other.axes, **known.axes})
        return self.calls[row]

    def _homes(self, call: Owner, usual: Mapping[str, Ranks]) -> Mapping[Key, Owner]:
        """Return the rows in which the cells stand that a call owns.

        It is the row of the calls of lower ranks with which it shares cells, if that is one row, and it is the only
        partner of these calls on its rank, or has a step, at which a row may come in parts; otherwise a row of its own,
        also if the lower rank gives one of the names in another call, as it usually does, or has another cell of one.
        A call with a step may be several that were joined, and be shared with several rows: then each cell stands with
        the shared one before it.
        """
        cells = [(key, self.cells[key]) for key in self.calls[call].keys if key in self.cells]
        own = [key for key, cell in cells if cell.owner == call]
        lower = [cell for _, cell in cells if cell.owner[0] < call[0]]
        has_step, rows = self.calls[call].step is not None, {cell.row for cell in lower}
        if not rows or not (has_step or (len(rows) == 1 and all(self._is_partner(call, one.owner) for one in lower))):
            return dict.fromkeys(own, call)
        homes, row = dict[Key, Owner](), lower[0].row
        for key, cell in cells:
            if cell.owner == call:
                homes[key] = row or call
            elif cell.owner[0] < call[0]:
                row = cell.row
        apart = {
            home
            for key, home in ((key, homes[key]) for key in own)
            if self.rows.get(home, {}).get(key.name, key) != key or home[0] in usual.get(key.name, NOBODY)
        }
        return {key: call if home in apart else home for key, home in homes.items()}

    def _is_partner(self, call: Owner, lower: Owner) -> bool:
        """Return whether a rank shares with a call of a lower rank only this call."""
        rank, number = call
        keys = self.calls[lower].keys if lower in self.calls else ()
        cells = [self.cells[key] for key in keys if key in self.cells]
        return all(cell.calls.get(rank) == number for cell in cells if rank in cell.ranks)

    def _place(self, key: Key, cell: Cell, row: Owner) -> None:
        if row != cell.row:
            if cell.row is not None:
                before = self.rows[cell.row]
                if before.get(key.name) == key:
                    del before[key.name]
                if not before:
                    del self.rows[cell.row]
                    self.open.pop(cell.row, None)
            cell.row = row
            self.rows.setdefault(row, {})[key.name] = key
        if cell.shown != cell.ranks:
            self.reopen(row)

    def reopen(self, row: Owner) -> None:
        self.open[row] = None
        for name, key in self.rows[row].items():
            self.by_name.setdefault(name, {})[key] = None

    def restore(self, written: Remembered, number: int) -> None:
        """Make cells of a row that was written; it is opened in the round of this number."""
        home, _, _, step, x, axes, serial, ranks, lacks, lanes = written
        keys = written.keys
        self.calls.setdefault(home, Known(step, x, axes, keys))
        row = self.rows.setdefault(home, {})
        for index, key in enumerate(keys):
            if key not in self.cells and key.name not in row:
                those, lowest = ranks[index], min(ranks[index])
                owner = home if lowest == home[0] else (lowest, NEVER)  # which of its calls, is not remembered
                total = number_at(*lanes, index, len(keys))
                cell = self.cells[key] = Cell(serial, number, total, those, dict([home]), owner, home, those, home)
                cell.lacks, cell.flagged = lacks[index], any(lacks)
                row[key.name] = key
        if not row:
            del self.rows[home]

    def take(self, row: Owner) -> tuple[Known, list[tuple[Key, Cell]]]:
        known = self.calls[row]
        kept = [(key, self.cells.pop(key)) for key in self.rows.pop(row).values()]
        self.open.pop(row, None)
        for key, _ in kept:
            of_name = self.by_name.get(key.name, {})
            of_name.pop(key, None)
            if not of_name:
                self.by_name.pop(key.name, None)
        for call in {row, *(call for _, cell in kept for call in (cell.owner, *cell.calls.items()))}:
            if call in self.calls and not any(key in self.cells for key in self.calls[call].keys):
                del self.calls[call]
        return known, kept
