"""The rows that wait for ranks, which of them a round finishes, and those that may still be corrected. Pure.

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.calls import Key, Names
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Contributors, Progress, Ranks
from dist_wandb.exchange.protocol.lanes import Lanes, Number, lanes_of
from dist_wandb.exchange.protocol.placing import Cell, Known, Memory, Owner, Placing, Remembered

_FEW = 64  # open rows that are all checked in each round


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
        return self.placing.cells

    @property
    def open(self) -> Mapping[Owner, None]:
        """The open rows, in the order in which they came."""
        return self.placing.open

    def is_new(self, key: Key) -> bool:
        """Return whether no rank has contributed to a cell, as far as is remembered."""
        return key not in self.cells and self.memory.row_of(key) is None

    def unwritten(self) -> Iterator[Key]:
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
            cells[key].joined = self.serial
            names.setdefault(cells[key].serial, []).append(key.name)
        self.placing.enter(call, known, ranks, self.ranks.usual)
        for serial, of_serial in names.items():
            self.ranks.note(of_serial, ranks, serial, self.round, known.step)

    def recall(self, row: Owner) -> None:
        """Make cells of a row that is remembered."""
        self.placing.restore(self.memory.pop(row), self.round)

    # Ranks come and go

    def resize(self, members: Ranks, lost: Ranks) -> None:
        is_new, joined = not lost <= self.ranks.lost.keys(), members - self.ranks.members
        self.ranks.resize(members, lost, self.round)
        if is_new:  # rows were written before it was known that a lost rank logs their names
            for row in self.memory:
                if any(self.ranks.lost_before(*one, row.serial) for one in zip(row.names, row.ranks, strict=True)):
                    self.recall(row.owner)
            for key, cell in self.cells.items():
                cell.lacks |= self.ranks.lost_before(key.name, cell.ranks, cell.serial)
            self._reopen_changed()
        if not joined <= self.taken.keys():  # who logs what was learnt from too few ranks
            self.ranks.usual.clear()
            self.ranks.version += 1

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

    def uneven(self) -> dict[str, dict[int, int]]:
        """Return `counts` of names that ranks have logged unequally often; no x axes, which belong to their calls."""
        counts = self.counts.items()
        return {name: those for name, those in counts if len({*those.values()}) > 1 and name not in self.axes}

    def close(self, row: Owner) -> None:
        if row in self.memory:
            self.recall(row)
        known, kept = self.placing.take(row)
        names, _, occurrences = zip(*(key for key, _ in kept), strict=True)
        cells = [cell for _, cell in kept]
        ranks, lacks = [cell.ranks for cell in cells], [self.missing(cell) for cell in cells]
        serial, lanes = min(cell.serial for cell in cells), lanes_of([cell.number for cell in cells])
        self.memory.add(Remembered(row, names, occurrences, *known[:3], serial, ranks, lacks, lanes))


_TUPLES = {kind.__name__: kind for kind in (Key, Known, Number, Row)}
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


class Patience(NamedTuple):
    """What rows wait for in a round."""

    most_open: int  # how many rows may be open
    needs_primary: Callable[[str], bool]  # see `Rounds`
    of_new: int = NEVER  # rounds up to which cells of names that were never written have waited long enough
    of_all: int = NEVER  # the same for all cells
    everything: bool = False  # whether all ranks pause or close: nothing is waited for
    behind: bool = False  # whether some rank has more waiting than it could offer: nobody is given up now


class Conclusion:
    """The end of one round, in which ranks have contributed to the cells `touched`."""

    def __init__(self, table: Table, touched: Collection[Key], patience: Patience) -> None:
        self._table = table
        self._placing = table.placing
        self._ranks = table.ranks
        self._touched = touched
        self._patience = patience

    def rows(self) -> Iterator[tuple[Owner, Row]]:
        """Yield the finished rows with their owners, in the order in which they were opened."""
        while ready := self._ready():
            for _, row in sorted(ready):
                yield from ((row, written) for written in self._written(row))
            if self._ranks.version == self._placing.checked:
                break

    def _ready(self) -> list[tuple[int, Owner]]:
        """Return the finished open rows, each with its serial."""
        ready: dict[Owner, int] = {}
        rows = self._candidates()
        while rows:
            self._placing.checked = self._ranks.version
            for row in rows:
                keys = self._table.unwritten_in(row)
                if not keys:  # its flag has changed twice
                    self._table.close(row)
                    continue
                is_crowded = len(self._placing.open) - len(ready) > self._patience.most_open
                if not (self._patience.everything or is_crowded or not any(self._waits(key) for key in keys)):
                    continue
                awaited = [self._awaited(key, self._placing.cells[key]) for key in keys]  # before one is given up
                for key, (rest, is_long) in zip(keys, awaited, strict=True):
                    self._give_up(key, rest, is_long=is_long)
                ready[row] = min(self._placing.cells[key].serial for key in self._placing.rows[row].values())
            if self._ranks.version == self._placing.checked:
                break
            rows = [row for row in self._placing.open if row not in ready]  # ranks may not be awaited any more
        return [(serial, row) for row, serial in ready.items()]

    def _candidates(self) -> list[Owner]:
        """Return open rows that may be finished: touched ones, those that ranks have passed, and overdue ones."""
        cells, is_other = self._placing.cells, self._ranks.version != self._placing.checked
        if self._patience.everything or is_other or len(self._placing.open) <= min(_FEW, self._patience.most_open):
            return list(self._placing.open)
        touched = [(key.name, cells[key]) for key in self._touched if key in cells]
        rows = {cell.row for _, cell in touched}
        newest: dict[str, int] = {}
        for name, cell in touched:
            newest[name] = max(newest.get(name, NEVER), cell.serial)
        for name, serial in newest.items():
            for key in self._placing.by_name.get(name, ()):
                cell = cells[key]
                if cell.serial >= serial:
                    break
                if not self._ranks.awaited(name, cell.ranks, cell.serial, key.step)[0]:
                    rows.add(cell.row)
        overdue = max(self._patience.of_new, self._patience.of_all)
        spare = len(self._placing.open) - self._patience.most_open
        for number, row in enumerate(self._placing.open):
            if number >= spare and all(cells[key].born > overdue for key in self._placing.rows[row].values()):
                break
            rows.add(row)
        return [row for row in self._placing.open if row in rows]

    def _awaited(self, key: Key, cell: Cell) -> tuple[Ranks, bool]:
        axes, beside = self._table.axes, NOBODY
        if key.name in axes and cell.row is not None and not self._placing.rows[cell.row].keys() <= axes.keys():
            return NOBODY, False  # it has become an x axis since, which is no cell of the later calls
        if key.name not in self._ranks.usual and cell.row is not None:
            # not the ranks that have logged other values of its row, and then another call
            others = [self._placing.cells[other] for other in self._placing.rows[cell.row].values()]
            givers = NOBODY.union(*{other.ranks for other in others}) - cell.ranks
            beside = self._ranks.passed(givers, max(other.serial for other in others)) if givers else NOBODY
        return self._ranks.awaited(key.name, cell.ranks, cell.serial, key.step, beside=beside)

    def _waits(self, key: Key) -> bool:
        cell = self._placing.cells[key]
        rest, is_long = self._awaited(key, cell)
        if not rest or (cell.born <= self._patience.of_all and not self._patience.behind):
            return False
        return is_long or cell.born > self._patience.of_new or (0 in rest and self._patience.needs_primary(key.name))

    def _give_up(self, key: Key, rest: Ranks, *, is_long: bool) -> None:
        """Finish a cell, for which these ranks are still awaited: note who is missing."""
        cell = self._placing.cells[key]
        cell.lacks |= self._ranks.lacking(key.name, cell.ranks, cell.born)
        if self._patience.everything or not rest or (cell.stale and cell.shown is None):
            return
        if not is_long:
            self._ranks.give_up_new(rest)
            return
        self._table.told.append(("gave up", key, rest))
        cell.lacks |= rest
        self._ranks.give_up(key.name, rest, cell.born, self._table.round)

    def _written(self, row: Owner) -> Iterator[Row]:
        """Yield a row as it is to be written, and remember it."""
        known, here = self._placing.with_axes(row) if self._table.axes else self._placing.calls[row], []
        for key in self._placing.rows[row].values():
            cell = self._placing.cells[key]
            if cell.stale and cell.shown is None and self._ranks.others(key.name, cell.ranks):
                self._table.told.append(("too late", key, cell.ranks))
                cell.shown, cell.at = cell.ranks, row
            elif cell.at in (None, row) or cell.shown != cell.ranks or cell.flagged:  # not elsewhere, and right
                here.append((key, cell))
        if here:
            order = {key: index for index, key in enumerate(known.keys)}
            here.sort(key=lambda one: order.get(one[0], len(order)))
            missing = NOBODY.union(*(self._table.missing(cell) for _, cell in here))
            corrects = any(cell.shown is not None for _, cell in here)
            names, _, occurrences = zip(*(key for key, _ in here), strict=True)
            lanes = lanes_of([cell.number for _, cell in here])
            counts = tuple(len(cell.ranks) for _, cell in here)
            for key, cell in here:
                cell.shown, cell.at, cell.flagged = cell.ranks, row, bool(missing)
                self._ranks.note_usual((key.name,), cell.ranks)
            serial = min(cell.serial for _, cell in here)
            place = names, occurrences, known.step, known.x
            joined = () if corrects else [cell.joined for _, cell in here]
            yield Row(*place, lanes, known.axes, counts, len(missing), corrects, serial=serial, joined=joined)
        self._table.close(row)
