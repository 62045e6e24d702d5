"""The cells of a unit: open, finished, and finished by a guess. Pure, and equal on all ranks but for `own`.

A cell is one name at one position (step, or none) and occurrence there.

States of a cell: *open*, from the first contribution until it is finished; *finished*, and remembered (the last
32,768); *forgotten*, known only by how far back memory does not reach. A late contribution to a finished cell opens it
again from its totals, and the corrected value is written again. One to a forgotten cell opens it from nothing: if ranks
are missing that had contributed before, it is not written, because a better value stands there already.

A finished cell is *assumed* where nothing proves that the silent ranks have passed it. That ends when all ranks have
contributed to a later row. If one of them turns out to log the name but is lost before it has contributed, the value is
written again with a flag.
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
    Place,
    Spread,
    cell_as_list,
    cell_from_list,
    total_of,
)
from dist_wandb.exchange.protocol.names import Name, Names

_new = tuple.__new__  # of named tuples, without a call in between: it is on the way of every number
_STALE_NOTED = 65_536  # of how many names and occurrences it is noted what was forgotten
_MOST_ASSUMED = 4  # times as many finished cells as are remembered: of how many it is known that they rest on a guess


def row_of(key: Key, origin: float) -> tuple[Place, float]:
    """What the cells of one row have in common: without a step, each call is a row of its own."""
    return key.place, origin if key.place.counted else 0.0


class Members(NamedTuple):
    """The ranks of the unit.

    Args:
        size: How many take part.
        absent: How many should, but do not.
        doubts: Whether these are there, but not waited for any more, so that they may log what they never did.
        has_lost: Whether a rank that took part is gone.
    """

    size: int
    absent: int = 0
    doubts: bool = False
    has_lost: bool = False


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
        """Number of rows that the cells belong to."""
        return len({(key.place, key.occurrence if key.place.counted else 0) for key in self})

    def close(self, key: Key) -> Cell:
        """Close a cell."""
        of_name = self.by_name[key.name]
        del of_name[key]
        if not of_name:
            del self.by_name[key.name]
        return self.pop(key)


class FinishedCells(OrderedDict[Key, tuple[Totals, float]]):
    """What was contributed to finished cells, and the origin; the oldest are forgotten.

    Args:
        remembered: How many are kept.
    """

    def __init__(self, remembered: int) -> None:
        super().__init__()
        self.stale: dict[tuple[str, int], int] = {}  # by name and occurrence: the largest step that was forgotten
        self._remembered = remembered

    def is_stale(self, key: Key) -> bool:
        """Whether a cell may have been finished and forgotten, as one that lies behind it was."""
        if key.place.counted:
            return key.occurrence <= self.stale.get((key.name, -1), -1)
        step = self.stale.get((key.name, key.occurrence))
        return step is not None and key.place.step <= step

    def forget(self, least: int) -> None:
        """Keep the memory bounded, at `least` cells; note how far it does not reach."""
        while len(self) > max(self._remembered, least):
            key, _ = self.popitem(last=False)
            if key.place.counted:
                self.stale[key.name, -1] = max(key.occurrence, self.stale.get((key.name, -1), -1))
            else:
                before = self.stale.get((key.name, key.occurrence), key.place.step)
                self.stale[key.name, key.occurrence] = max(key.place.step, before)
            while len(self.stale) > _STALE_NOTED:
                del self.stale[next(iter(self.stale))]


class Assumed(NamedTuple):
    """Of a cell that was finished as if the silent ranks never logged its name.

    Args:
        number: How many cells were opened before it.
        origin: As of the cell.
        contributors: How many ranks had contributed to it.
    """

    number: int
    origin: float
    contributors: int


class AssumedCells(OrderedDict[Key, Assumed]):
    """Cells that were finished by a guess, in the order in which they were finished; the oldest are forgotten.

    Args:
        names: The names that the ranks have agreed on.
        most: How many are kept.
    """

    def __init__(self, names: Names, most: int) -> None:
        super().__init__()
        self._names = names
        self._most = most

    def note(self, value: Finished, number: int, origin: float, size: int, *, sure: bool) -> None:
        """Note of a finished cell whether nothing but a guess says that nobody is missing."""
        self.pop(value.key, None)
        if sure:
            self._names[value.key.name].proven = True
        elif not value.missing and value.totals.contributors < size:
            self[value.key] = Assumed(number, origin, value.totals.contributors)
            if len(self) > self._most:
                self.popitem(last=False)

    def prove(self, key: Key, number: int, origin: float) -> None:
        """All ranks have contributed to a cell: rows before it rest on no guess any more."""
        row = row_of(key, origin)
        while self:
            oldest, assumed = next(iter(self.items()))
            if assumed.number >= number or row_of(oldest, assumed.origin) == row:
                return
            del self[oldest]
            self._names[oldest.name].proven = True

    def disproved(self) -> list[Key]:
        """Cells of names to which more ranks contribute than had to the cell."""
        return [key for key, assumed in self.items() if self._names[key.name].most > assumed.contributors]


class Ledger:
    """The cells of a unit and what is usual in them.

    Args:
        size: Number of ranks in the unit.
        names: The names that the ranks have agreed on.
        remembered: How many finished cells are kept for contributions that come late.
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
        """Go on with other ranks than before; see `Rounds.resize`."""
        has_lost = self.members.has_lost or size < self.members.size
        self.members = Members(size, absent, doubts, has_lost)

    # Open cells

    def open_cell(self, key: Key) -> Cell:
        """The open cell, opened if it was not."""
        cell = self.open.get(key)
        if cell is None:
            before = self.finished.pop(key, None)
            cell = Cell(self.round) if before is None else Cell(self.round, *before, corrects=True)
            cell.number = self.opened
            self.opened += 1
            self.open.add(key, cell)
        return cell

    def expected(self, name: str) -> int:
        """How many ranks are waited for: as many as contributed when the name was finished last."""
        return min(self.members.size, self.names[name].usual or self.members.size)

    def is_complete(self, key: Key, cell: Cell) -> bool:
        """Whether all have contributed who are waited for."""
        return cell.totals.contributors - cell.gone >= self.expected(key.name)

    def is_by_all(self, cell: Cell) -> bool:
        """Whether all ranks have contributed to a cell in its turn, so that they have passed all rows before it."""
        return not cell.corrects and cell.totals.contributors - cell.gone >= self.members.size > 1

    @property
    def lacks_own(self) -> bool:
        """Whether there are open cells to which this rank has not contributed."""
        return len(self.own) < len(self.open)

    def contributed(self) -> list[int]:
        """Positions, among the open cells, of those to which this rank has contributed."""
        return [position for position, key in enumerate(self.open) if key in self.own]

    def recount(self, contributed: Iterable[Counted]) -> None:
        """Count, in open cells, the contributors that are gone apart from those that take part."""
        present = total_of(contributed)
        for position, cell in enumerate(self.open.values()):  # of a correction, the earlier contributors are not known
            cell.gone = 0 if cell.corrects else max(0, cell.totals.contributors - present[position])

    # Finished cells

    def is_too_late(self, key: Key, cell: Cell) -> bool:
        """Whether what was finished of a cell before, and is forgotten, is better than what was contributed now."""
        if cell.corrects or not self.finished.is_stale(key):
            return False
        return key in self.assumed or cell.totals.contributors < self.names[key.name].whole

    def finish(
        self, key: Key, totals: Totals, origin: float, *, gone: int = 0, corrects: bool = False, gave_up: bool = False
    ) -> Finished:
        """Note what is finished, and what is usual by it; `gone` of the contributors do not take part any more."""
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
        """How many ranks are missing: of those whom patience ran out with, or at most those that are not there."""
        size, absent, doubts, _ = self.members
        if contributors == known.whole and not (known.lacking or gave_up or doubts):  # as nearly always
            return 0
        have_left = self.unit - size - absent  # with a word, after all that they contribute
        absent -= max(0, gone - have_left)  # those of them that have contributed
        if doubts and not known.proven:
            return min(absent, self.unit - contributors)
        fewer = max(0, (known.whole or self.unit) - contributors)
        known.lacking = gave_up or (known.lacking and bool(fewer))
        return fewer if known.lacking else min(absent, fewer)

    def flag(self, key: Key) -> Finished:
        """A finished value anew, with a flag; without the value where it is forgotten, or has no number."""
        _, origin, contributors = self.assumed.pop(key)
        totals, _ = self.finished.get(key, (Totals(), 0.0))
        missing = max(1, min(self.members.absent, self.names[key.name].most - contributors))
        known = totals if totals.number else Totals()
        return Finished(key, known, int(-origin) % CALLS, corrects=True, missing=missing)

    # What a rank that joins needs to go on

    def snapshot(self) -> dict[str, Any]:
        """As JSON can hold it."""
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
        """Take over what others know."""
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
