"""The rows that wait for ranks, those that may still be corrected, and who logs what. Pure, and equal on all ranks.

A row waits for the ranks that usually log its names (`contributors`), and is written once, with all its cells
(`placing`). Who is still missing when patience runs out is noted, and the row is flagged. What comes later corrects the
row: it is written again, as a whole.

States of a row: *open*, from its first cell until all its cells are written; *remembered* while some rank of the unit
may still add to it (`Memory`); *forgotten*. A row to which all ranks have contributed is forgotten at once. A value for
a row that was forgotten earlier is too late, and not written.

Ranks that join late get this state as JSON values: plain objects, by their attributes (`encoded`).

The rules, with the reasons and simulations of them, are those of a reference model; `tests/support/row_model.py` judges
their results.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.calls import Key, Names
from dist_wandb.exchange.protocol.contributors import NOBODY, Contributors, Progress, Ranks
from dist_wandb.exchange.protocol.lanes import Lanes, Number, lanes_of
from dist_wandb.exchange.protocol.placing import Cell, Known, Memory, Owner, Placing, Remembered

_TUPLES = {kind.__name__: kind for kind in (Key, Known, Number)}


class Row(NamedTuple):
    """A row to be written."""

    names: Names  # in the order of its owner's call
    occurrences: Sequence[int]  # of each name, as in `Key`
    step: int | None  # the step that the user gave
    x: int  # its position, as in `Call`
    lanes: Lanes  # of all ranks that contributed
    axes: Mapping[str, float]  # the user's x axes in its owner's call
    ranks: Sequence[int]  # how many contributed to each name
    missing: int = 0  # ranks that usually log one of the names, but left without notice, or were given up
    corrects: bool = False  # whether it replaces a row that was written before
    own: Sequence[Any] = ()  # what this rank alone keeps for it: one item for each of its calls

    def cells(self) -> list[Key]:
        """Return its cells."""
        return [Key(name, self.step, number) for name, number in zip(self.names, self.occurrences, strict=True)]

    def as_list(self) -> list[Any]:
        """Return it as JSON values, without `own`."""
        return [*self[:-1]]

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> Row:
        """Return the inverse of `as_list`."""
        names, occurrences, *rest = items
        return cls(tuple(names), tuple(occurrences), *rest)


class Table:
    """The replicated state of a unit's rows."""

    def __init__(self, size: int, remembered: int) -> None:
        self.ranks: Contributors = Contributors(size)
        self.round: int = 0  # how many so far
        self.serial: int = 0  # how many calls were taken so far; those that all ranks made count once
        self.names: dict[str, int] = {}  # that the ranks have agreed on, and their numbers
        self.axes: dict[str, None] = {}  # those that are x axes of the user
        self.taken: dict[int, int] = {}  # by rank: how many of its calls were taken
        self.told: list[tuple[str, Key, Ranks]] = []  # what ranks are to be told of this round: kind, cell, who
        self.counts: dict[str, dict[int, int]] = {}  # by name and closing rank: how often it logged it without a step
        self.memory: Memory = Memory(size, remembered)  # rows that were written
        self.placing: Placing = Placing()  # cells that wait, and their rows

    @property
    def cells(self) -> Mapping[Key, Cell]:
        """The cells of open rows."""
        return self.placing.cells

    @property
    def open(self) -> Mapping[Owner, None]:
        """The open rows, in the order in which they came."""
        return self.placing.open

    def forget_usual(self) -> None:
        """Forget who logs what, because this was learnt from too few ranks."""
        self.ranks.usual.clear()
        self.ranks.version += 1

    def is_new(self, key: Key) -> bool:
        """Return whether no rank has contributed to a cell, as far as is remembered."""
        return key not in self.cells and self.memory.row_of(key) is None

    def unwritten(self) -> Iterator[Key]:
        """Yield the cells whose contributions are not written yet."""
        rows, cells = self.placing.rows, self.cells
        return (key for row in self.open for key in rows[row].values() if cells[key].shown != cells[key].ranks)

    # Contributions

    def enter(self, call: Owner, known: Known, ranks: Ranks) -> None:
        """Add the cells of equal calls of some ranks, the lowest of which owns the call."""
        self.serial += 1
        names: dict[int, list[str]] = {}
        for key in known.keys:
            row, cells = self.memory.row_of(key), self.placing.cells
            if row is not None:
                self.recall(row)
            if key not in cells:
                cells[key] = Cell(self.serial, self.round, stale=self.memory.is_stale(key))
            elif cells[key].shown is not None:
                cells[key].born = self.round  # it is opened again
            names.setdefault(cells[key].serial, []).append(key.name)
        self.placing.enter(call, known, ranks, self.ranks.usual)
        for serial, of_serial in names.items():
            self.ranks.note(of_serial, ranks, serial, self.round)

    def recall(self, row: Owner) -> None:
        """Make cells of a row that is remembered."""
        self.placing.restore(self.memory.pop(row), self.round)

    # Ranks come and go

    def resize(self, members: Ranks, lost: Ranks) -> None:
        """Continue with other ranks; see `Rounds.resize`."""
        is_new = not lost <= self.ranks.lost.keys()
        self.ranks.resize(members, lost, self.round)
        if is_new:  # rows were written before it was known that a lost rank logs their names
            for row in self.memory:
                if any(self.ranks.lost_before(*one, row.serial) for one in zip(row.names, row.ranks, strict=True)):
                    self.recall(row.owner)
            for key, cell in self.cells.items():
                cell.lacks |= self.ranks.lost_before(key.name, cell.ranks, cell.serial)
            self._reopen_changed()

    def leave(self, ranks: Ranks) -> None:
        """Record that ranks contribute nothing more; rows that are flagged only for them are written once more."""
        if not ranks <= self.ranks.closed:
            self.ranks.close(ranks)
            for row in self.memory.flagged_for(self.ranks.closed):
                self.recall(row)
            self._reopen_changed()

    def _reopen_changed(self) -> None:
        for row in [row for row in self.placing.rows if row not in self.open]:
            if self.unwritten_in(row):
                self.placing.reopen(row)
            else:
                self.close(row)

    # Rows

    def unwritten_in(self, row: Owner) -> list[Key]:
        """Return the cells for which a row is to be written: their contributors, or its flag, have changed."""
        cells, keys = self.cells, self.placing.rows[row].values()
        found = [key for key in keys if cells[key].shown != cells[key].ranks]
        if found:
            return found
        lacks = any(self.missing(cells[key]) for key in keys)
        return [key for key in keys if cells[key].flagged != lacks]

    def missing(self, cell: Cell) -> Ranks:
        """Return the ranks that a cell lacks; who left without giving it has nothing to give."""
        return cell.lacks - cell.ranks - self.ranks.closed if cell.lacks else NOBODY

    def close(self, row: Owner) -> None:
        """Remember a row that was written."""
        if row in self.memory:
            self.recall(row)
        known, kept = self.placing.take(row)
        names, _, occurrences = zip(*(key for key, _ in kept), strict=True)
        cells = [cell for _, cell in kept]
        ranks, lacks = [cell.ranks for cell in cells], [self.missing(cell) for cell in cells]
        serial, lanes = min(cell.serial for cell in cells), lanes_of([cell.number for cell in cells])
        self.memory.add(Remembered(row, names, occurrences, *known[:3], serial, ranks, lacks, lanes))


_OBJECTS = {kind.__name__: kind for kind in (Cell, Contributors, Memory, Placing, Progress, Table)}


def encoded(value: Any) -> Any:
    """Return a value as JSON values: a list with the name of its type and its items, or an object of its attributes."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return [kind, base64.b64encode(value).decode()]
    if isinstance(value, frozenset):
        return [kind, *sorted(value)]
    if isinstance(value, (list, tuple)):
        return [kind, *map(encoded, value)]
    if isinstance(value, dict):
        return [kind, *([encoded(key), encoded(item)] for key, item in value.items())]
    names = getattr(value, "__slots__", None) or vars(value)
    return {"": kind, **{name: encoded(getattr(value, name)) for name in names}}


def decoded(value: Any) -> Any:
    """Return the inverse of `encoded`."""
    if isinstance(value, dict):
        made = object.__new__(_OBJECTS[value[""]])
        for name, item in value.items():
            if name:
                setattr(made, name, decoded(item))
        return made
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "bytes":
        return base64.b64decode(items[0])
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in items}
    if kind in _TUPLES:
        return _TUPLES[kind](*map(decoded, items))
    return {"list": list, "tuple": tuple, "frozenset": frozenset}[kind](map(decoded, items))
