"""Which cells stand together in a row: those that wait for ranks, or are written in this round. Pure.

The *owner* of a cell is the call of the lowest rank that contributed to it. A row holds the cells of one owner's call,
and what a higher rank adds to it (`_home`): what its call has besides cells of calls that stand in this one row. It
does not need an identity of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import Number, number_at
from dist_wandb.exchange.protocol.memory import Owner, Remembered


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


class Placing:
    """Cells and their rows."""

    def __init__(self) -> None:
        self.cells: dict[Key, Cell] = {}
        self.rows: dict[Owner, dict[str, Key]] = {}  # the cells of each row, by name
        self.open: dict[Owner, None] = {}  # rows with something that is not written, in the order in which they came
        self.calls: dict[Owner, Known] = {}  # those that own cells, or did
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
            row = self._home(owner, usual) if owner in self.calls else None
            for key in of_owner[owner]:
                self._place(key, cells[key], row or cells[key].row or call)
        if call not in of_owner:
            del self.calls[call]

    def _home(self, call: Owner, usual: Mapping[str, Ranks]) -> Owner:
        """Return the row in which what a call owns stands.

        It is the row of the calls of lower ranks with which it shares cells, if that is one row, and it is the only
        partner of these calls on its rank; otherwise a row of its own. It also has one if the lower rank will give one
        of the names in another call, as it usually does, or has another cell of one.
        """
        cells = [(key, self.cells[key]) for key in self.calls[call].keys if key in self.cells]
        lower = [cell for _, cell in cells if cell.owner[0] < call[0]]
        rows = {cell.row for cell in lower}
        if len(rows) != 1 or not all(self._is_partner(call, owner) for owner in {cell.owner for cell in lower}):
            return call
        row = rows.pop() or call
        names = self.rows.get(row, {})
        own = [key for key, cell in cells if cell.owner == call]
        is_apart = any(names.get(key.name, key) != key or row[0] in usual.get(key.name, NOBODY) for key in own)
        return call if is_apart else row

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
        """Let a row be written, or written again."""
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
        """Remove a row, and return its owner's call and its cells."""
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
