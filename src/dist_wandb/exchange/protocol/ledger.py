"""The cells of a unit: open, finished, and finished by assumption. Pure, and equal on all ranks except for `own`.

A cell is one name at one position (a step, or none) and occurrence.

States of a cell: *open*, from the first contribution until it is finished; *finished* and remembered (the last 32,768);
*forgotten*, known only as lying before the limit of memory. A late contribution to a finished cell reopens it with its
totals, and the corrected value is written again. A late contribution to a forgotten cell opens it from nothing. If
ranks are missing that had contributed before, the new value is not written, because a better one was written already.

A finished cell is *assumed* if nothing proves that the silent ranks have passed it. This ends when all ranks have
contributed to a later row. If one of the silent ranks turns out to log the name but is lost before it has contributed,
the value is written again with a flag.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import (
    CALLS,
    Cell,
    Counted,
    Finished,
    Key,
    Position,
    Spread,
    cell_as_list,
    cell_from_list,
    total_of,
)
from dist_wandb.exchange.protocol.names import Name, Names

_new = tuple.__new__  # of named tuples, without a call in between: it is called for every number
_STALE_NOTED = 65_536  # names and occurrences for which the largest forgotten step is kept
_MOST_ASSUMED = 4  # assumed cells that are kept, as a multiple of the finished cells that are remembered


def row_of(key: Key, origin: float) -> tuple[Position, float]:
    """Return the key of a cell's row; without a step, each call is a row of its own."""
    return key.position, origin if key.position.counted else 0.0


class Members(NamedTuple):
    """The ranks of the unit."""

    size: int  # number of participating ranks
    absent: int = 0  # number of ranks that should participate, but do not
    doubts: bool = False  # whether the absent ranks are alive, but no longer waited for: see `Rounds.resize`
    has_lost: bool = False  # whether a rank that participated is gone


class OpenCells(OrderedDict[Key, Cell]):
    """Open cells in the order in which they were opened, and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, dict[Key, Cell]] = {}

    def add(self, key: Key, cell: Cell) -> None:
        """Open a cell."""
        self[key] = cell
        self.by_name.setdefault(key.name, {})[key] = cell

    def count_rows(self) -> int:
        """Return the number of rows that the cells belong to."""
        return len({(key.position, key.occurrence if key.position.counted else 0) for key in self})

    def close(self, key: Key) -> Cell:
        """Close a cell."""
        of_name = self.by_name[key.name]
        del of_name[key]
        if not of_name:
            del self.by_name[key.name]
        return self.pop(key)


class FinishedCells(OrderedDict[Key, tuple[Totals, float]]):
    """The totals and origins of finished cells; beyond `remembered` of them, the oldest are forgotten."""

    def __init__(self, remembered: int) -> None:
        super().__init__()
        self.stale: dict[tuple[str, int], int] = {}  # the largest forgotten step, by name and occurrence
        self._remembered = remembered

    def is_stale(self, key: Key) -> bool:
        """Return whether a cell may have been finished and forgotten, because one at its position or later was."""
        if key.position.counted:
            return key.occurrence <= self.stale.get((key.name, -1), -1)
        step = self.stale.get((key.name, key.occurrence))
        return step is not None and key.position.step <= step

    def forget(self, least: int) -> None:
        """Forget the oldest cells, but keep at least `least`; record the largest steps that were forgotten."""
        while len(self) > max(self._remembered, least):
            key, _ = self.popitem(last=False)
            if key.position.counted:
                self.stale[key.name, -1] = max(key.occurrence, self.stale.get((key.name, -1), -1))
            else:
                before = self.stale.get((key.name, key.occurrence), key.position.step)
                self.stale[key.name, key.occurrence] = max(key.position.step, before)
            while len(self.stale) > _STALE_NOTED:
                del self.stale[next(iter(self.stale))]


class Assumed(NamedTuple):
    """A cell that was finished on the assumption that the silent ranks never log its name."""

    number: int  # number of cells opened before it
    origin: float  # as of the cell
    contributors: int  # number of ranks that had contributed to it


class AssumedCells(OrderedDict[Key, Assumed]):
    """Cells that were finished by assumption, in the order in which they were finished; at most `most`, the newest."""

    def __init__(self, names: Names, most: int) -> None:
        super().__init__()
        self._names = names
        self._most = most

    def note(self, value: Finished, number: int, origin: float, size: int, *, sure: bool) -> None:
        """Record whether a finished cell is complete by assumption only."""
        self.pop(value.key, None)
        if sure:
            self._names[value.key.name].proven = True
        elif not value.missing and value.totals.contributors < size:
            self[value.key] = Assumed(number, origin, value.totals.contributors)
            if len(self) > self._most:
                self.popitem(last=False)

    def prove(self, key: Key, number: int, origin: float) -> None:
        """Drop the assumption about earlier rows, because all ranks have contributed to this cell."""
        row = row_of(key, origin)
        while self:
            oldest, assumed = next(iter(self.items()))
            if assumed.number >= number or row_of(oldest, assumed.origin) == row:
                return
            del self[oldest]
            self._names[oldest.name].proven = True

    def disproved(self) -> list[Key]:
        """Return cells of names that have more contributors than the cell had."""
        return [key for key, assumed in self.items() if self._names[key.name].most > assumed.contributors]


class Ledger:
    """The cells of a unit and the usual contributors of its names.

    Args:
        size: Number of ranks in the unit.
        names: The names that the ranks have agreed on.
        remembered: Number of finished cells kept for late contributions.
    """

    def __init__(self, size: int, names: Names, remembered: int) -> None:
        self.members: Members = Members(size)
        self.unit = size
        self.names = names
        self.round: int = 0
        self.open: OpenCells = OpenCells()
        self.opened: int = 0
        self.finished: FinishedCells = FinishedCells(remembered)
        self.assumed: AssumedCells = AssumedCells(names, _MOST_ASSUMED * remembered)
        self.own: set[Key] = set()  # open cells that this rank contributed to

    def resize(self, size: int, absent: int, *, doubts: bool) -> None:
        """Continue with other ranks; see `Rounds.resize`."""
        has_lost = self.members.has_lost or size < self.members.size
        self.members = Members(size, absent, doubts, has_lost)

    # Open cells

    def open_cell(self, key: Key) -> Cell:
        """Return the open cell of a key, opening it if necessary."""
        cell = self.open.get(key)
        if cell is None:
            before = self.finished.pop(key, None)
            cell = Cell(self.round) if before is None else Cell(self.round, *before, corrects=True)
            cell.number = self.opened
            self.opened += 1
            self.open.add(key, cell)
        return cell

    def expected(self, name: str) -> int:
        """Return the number of awaited ranks: as many as contributed when the name was finished last."""
        return min(self.members.size, self.names[name].usual or self.members.size)

    def is_complete(self, key: Key, cell: Cell) -> bool:
        """Return whether all awaited ranks have contributed."""
        return cell.totals.contributors - cell.gone >= self.expected(key.name)

    def is_by_all(self, cell: Cell) -> bool:
        """Return whether all ranks have contributed to a cell in order, so that they have passed all earlier rows."""
        return not (cell.corrects or cell.displaced) and cell.totals.contributors - cell.gone >= self.members.size > 1

    @property
    def lacks_own(self) -> bool:
        """Whether there are open cells to which this rank has not contributed."""
        return len(self.own) < len(self.open)

    def contributed(self) -> list[int]:
        """Return the indices, among the open cells, of those to which this rank has contributed."""
        return [index for index, key in enumerate(self.open) if key in self.own]

    def recount(self, contributed: Iterable[Counted]) -> None:
        """Count the contributors of open cells that no longer participate."""
        present = total_of(contributed)
        for index, cell in enumerate(self.open.values()):  # a correction's earlier contributors are not known
            cell.gone = 0 if cell.corrects else max(0, cell.totals.contributors - present[index])

    # Finished cells

    def is_too_late(self, key: Key, cell: Cell) -> bool:
        """Return whether the forgotten value of a cell is better than the value of its new contributions."""
        if cell.corrects or not self.finished.is_stale(key):
            return False
        return key in self.assumed or cell.totals.contributors < self.names[key.name].whole

    def finish(
        self, key: Key, totals: Totals, origin: float, *, gone: int = 0, corrects: bool = False, gave_up: bool = False
    ) -> Finished:
        """Record a finished cell and the usual contributors of its name; `gone` of its contributors have left."""
        name, contributors = self.names[key.name], totals.contributors
        missing = self._missing(name, contributors, gone, gave_up=gave_up)
        name.usual = contributors
        name.most = max(name.most, contributors)
        if not missing:
            name.whole = contributors
        self.finished[key] = totals, origin
        spread = Spread() if name.has_spread and 0 < totals.number <= self.members.size else None
        return _new(Finished, (key, totals, int(-origin) % CALLS, corrects, missing, spread))

    def _missing(self, known: Name, contributors: int, gone: int, *, gave_up: bool) -> int:
        """Return the number of missing ranks: those that were given up on, or at most those that are absent."""
        size, absent, doubts, _ = self.members
        if contributors == known.whole and not (known.lacking or gave_up or doubts):  # the usual case
            return 0
        have_left = self.unit - size - absent  # with notice, after all their contributions
        absent -= max(0, gone - have_left)  # those that have contributed
        if doubts and not known.proven:
            return min(absent, self.unit - contributors)
        fewer = max(0, (known.whole or self.unit) - contributors)
        known.lacking = gave_up or (known.lacking and bool(fewer))
        return fewer if known.lacking else min(absent, fewer)

    def flag(self, key: Key) -> Finished:
        """Return a finished value again, with a flag; without the value if it is forgotten or has no number."""
        _, origin, contributors = self.assumed.pop(key)
        totals, _ = self.finished.get(key, (Totals(), 0.0))
        missing = max(1, min(self.members.absent, self.names[key.name].most - contributors))
        known = totals if totals.number else Totals()
        return Finished(key, known, int(-origin) % CALLS, corrects=True, missing=missing)

    # The state that a joining rank takes over

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "round": self.round,
            "names": self.names.as_list(),
            "cells": [cell_as_list(key, cell) for key, cell in self.open.items()],
            "done": [cell_as_list(key, Cell(0, *done)) for key, done in self.finished.items()],
            "stale": [[*key, step] for key, step in self.finished.stale.items()],
            "opened": self.opened,
            "assumed": [[key, *assumed] for key, assumed in self.assumed.items()],
            "lost": self.members.has_lost,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over the state of the other ranks."""
        self.round = int(snapshot["round"])
        self.names.restore(snapshot["names"])
        self.open.clear()
        self.open.by_name.clear()
        for key, cell in map(cell_from_list, snapshot["cells"]):
            self.open.add(key, cell)
        self.opened = int(snapshot["opened"])
        self.finished.clear()
        self.finished.update((key, (cell.totals, cell.origin)) for key, cell in map(cell_from_list, snapshot["done"]))
        self.finished.stale = {(name, occurrence): step for name, occurrence, step in snapshot["stale"]}
        self.assumed.clear()
        self.assumed.update((Key.of(key), Assumed(*assumed)) for key, *assumed in snapshot["assumed"])
        self.members = self.members._replace(has_lost=bool(snapshot["lost"]))
        self.own.intersection_update(self.open)
