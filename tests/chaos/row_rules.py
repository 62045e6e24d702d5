"""The rules of rows: a row is what one call of `log` logged, whole, at its place, with its value of the user's axis.

1. A number in a row is a cell: of one name and step, or the k-th of its name. Its owner is the call of its lowest rank.
2. All cells that one call owns stand in one row, with nothing of another call, except of calls at the same step whose
   axes agree. Where what only a higher rank adds to a call stands is judged by `support/row_model.py`.
3. A row lies at the place of its owner's call.
4. It has the value of the user's axis of its owner's call. A row of the axis alone is that of a call of the axis alone.
5. A row without a living rank that usually logs its names is marked. Each further row of the same call adds something.

Every row of a file must follow these rules, those that are corrected later as well. Where the rules leave open what
belongs together, the judge accepts all possibilities; comments below say where that is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from calls import Call, Column, Meaning, cells_of
from chaos_facts import Facts, Writer
from drawing import AXIS, NOTE, Spec
from driving import Row, RunFile

DEGRADED = "dist_wandb/degraded"
LIGHTNING_X, X = "trainer/global_step", "global_step"
# Names that each rank that logs them logs equally often; without a last part such as `_a` or `_0`.
REGULAR = frozenset({"loss", "burst", "thread", "metric", "beside", "common", "own", "note"})
REGULAR |= {"often", "second", "third", "fifth", "split", "turned", "axis"}

_Cell = tuple[str, int]  # column and cell


@dataclass(frozen=True)
class Violation:
    kind: str  # its kind in a word or two
    text: str


@dataclass(frozen=True, eq=False)
class _Standing:
    column: Column
    meaning: Meaning

    @property
    def cell(self) -> _Cell:
        return self.column.column, self.meaning.cell


@dataclass(frozen=True, eq=False)
class _Written:
    row: Row
    file: int
    missing: int
    standings: Sequence[_Standing]

    @property
    def cells(self) -> frozenset[_Cell]:
        return frozenset(standing.cell for standing in self.standings)

    @property
    def owners(self) -> list[Call]:
        """The calls that may own a number of the row, each once."""
        return list(dict.fromkeys(call for standing in self.standings for call in standing.meaning.owners))

    def owned_by(self, call: Call, *, own: bool) -> list[_Standing]:
        """Return what a call owns here for certain: as a value of its rank alone, or not."""
        mine = (standing for standing in self.standings if standing.meaning.owners == (call,))
        return [standing for standing in mine if standing.column.is_own is own]


@dataclass(frozen=True)
class RowRules:
    """The check of the rows of one writer."""

    spec: Spec
    facts: Facts  # what happened in it
    excused: Counter[str]  # counts what is no violation, but should be rare
    files: Sequence[RunFile]  # the files of the writer's run
    writer: Writer
    columns: Sequence[Column]  # what its run contains
    calls: Sequence[Call]  # the calls of the ranks whose numbers it contains

    def violations(self) -> Iterator[Violation]:
        for written in self._rows:
            if written.standings:
                yield from self._of_row(written)
            elif set(written.row) <= {AXIS, self._x, DEGRADED} | {name for name in written.row if name[0] == "_"}:
                yield from self._without_numbers(written)
        yield from self._of_own_values()
        yield from self._of_order()
        yield from self._of_axis_calls()

    # --- a row by itself ----------------------------------------------------------------------------------------------

    def _of_row(self, written: _Written) -> Iterator[Violation]:
        if written.missing and not self.facts.has_faults and self.writer.rank not in self.facts.left_alone:
            yield self._violation("flag without a fault", written, f"says that {written.missing} ranks are missing")
        mains = [call for call in written.owners if self._is_row_of(call, written)]
        if not mains:
            calls = "; ".join(map(str, written.owners))
            yield self._violation("mixed row", written, f"has values of several calls: {calls}")
            return
        places = {place for call in mains for place in call.places}
        if written.row.get(self._x) not in places:
            yield self._violation("wrong place", written, f"is not at {sorted(places)}, of {mains[0]}")
        if self.spec.axis:
            yield from self._of_axis(written, mains)
        for call in written.owners:
            for own in (False, True):
                yield from self._of_parts(written, call, own=own)

    def _is_row_of(self, main: Call, written: _Written) -> bool:
        return all(
            any(self._may_join(call, main) for call in standing.meaning.owners) for standing in written.standings
        )

    def _may_join(self, call: Call, main: Call) -> bool:
        """Return whether what a call owns may stand in the row of another."""
        return any(one is main or _agree(one, main) for one in (call, *self._made_as_well(call)))

    def _of_axis(self, written: _Written, mains: Sequence[Call]) -> Iterator[Violation]:
        """Check the value of the user's axis: W&B fills in the last one if a row lacks it."""
        found = written.row.get(AXIS)
        for main in mains:
            joined = [call for call in written.owners if call is main or _agree(call, main)]
            values = [call.axes[AXIS] for call in joined if AXIS in call.axes]
            if all(_is_close(found, value) for value in values) and (values or found is None):
                return
            if not values and any(
                AXIS in call.axes and _agree(call, main) and _is_close(found, call.axes[AXIS]) for call in self.calls
            ):
                return  # of another call at the same step, of which W&B alone makes the same row
            if written.missing and any(_is_close(found, one.axes.get(AXIS)) for one in self._made_as_well(main)):
                return  # of the lowest rank that made the call; its states or tables never came
        shown = next((main for main in mains if AXIS in main.axes), mains[0])
        yield self._violation("wrong axis", written, f"has {AXIS} {found}, not {shown.axes.get(AXIS)} of {shown}")

    def _of_parts(self, written: _Written, call: Call, *, own: bool) -> Iterator[Violation]:
        """Check that all cells of a call are here if one of them is."""
        if not written.owned_by(call, own=own) or (not own and self._made_as_well(call)):
            return
        if lacking := self._owned_for_certain(call, own=own) - written.cells:
            yield self._violation("torn row", written, f"lacks {sorted(lacking)} of {call}")

    def _owned_for_certain(self, call: Call, *, own: bool) -> set[_Cell]:
        """Return the cells that a call owns, whichever other ranks contribute."""
        owned = set()
        for column in self.columns:
            if column.is_own is own and column.name in call.cells:
                cell = call.cells[column.name][0]
                ranks = column.cells.get(cell, {})
                if ranks and min(ranks) == call.rank:
                    owned.add((column.column, cell))
        return owned

    def _without_numbers(self, written: _Written) -> Iterator[Violation]:
        """Check a row that has nothing but axes."""
        if AXIS not in written.row:
            if self.writer.rank not in self.facts.numbers_only:  # what is left of a row with a table
                yield self._violation("empty row", written, "has no values")
            return
        at = written.row.get(self._x)
        is_left = self.spec.has("tmp_gone")  # of a row with a table
        if not is_left and not any(
            at in call.places and _is_close(written.row[AXIS], call.axes.get(AXIS)) for call in self._of_axis_alone
        ):
            yield self._violation("axis-only row", written, "is not of a call of the axis alone")

    # --- rows together ------------------------------------------------------------------------------------------------

    def _of_own_values(self) -> Iterator[Violation]:
        """Check that a rank's texts, and its numbers under its label, stand in the row of the same call."""
        alone: dict[Call, set[_Written]] = {}
        plain: dict[Call, set[_Written]] = {}
        for written in self._rows:
            for call in written.owners:
                for own, rows in ((True, alone), (False, plain)):
                    if written.owned_by(call, own=own):
                        rows.setdefault(call, set()).add(written)
        for call, named in alone.items():
            if call in plain and not named & plain[call]:
                yield self._violation("torn row", min(named, key=id), f"is not the row of the other values of {call}")

    def _of_order(self) -> Iterator[Violation]:
        """Check that rows without a rank that usually logs the name are marked, and that no row is repeated."""
        final = {each.cell: each.meaning.ranks for written in self._rows for each in written.standings}
        usual: dict[str, set[int]] = defaultdict(set)
        before: dict[_Cell, tuple[frozenset[int], int]] = {}
        file = 0
        for written in self._rows:
            if written.file != file:  # it has all that the first file lacks
                file, before = written.file, {}
            known = [each.column.identifies_ranks for each in written.standings]
            repeated = [before.get(each.cell) == (each.meaning.ranks, written.missing) for each in written.standings]
            if written.standings and all(known) and all(repeated):
                yield self._violation("repeated row", written, "adds nothing to the earlier one")
            elif any(each.cell in before for each in written.standings):
                self.excused["corrected rows"] += 1
            for each in written.standings:
                late = (final[each.cell] - each.meaning.ranks) & usual[each.column.column]
                if late and not written.missing and self._must_be_marked(each.column):
                    yield self._violation(
                        "unmarked early row", written, f"lacks ranks {sorted(late)}, which came later"
                    )
                before[each.cell] = each.meaning.ranks, written.missing
            for each in written.standings:
                usual[each.column.column] |= each.meaning.ranks

    def _must_be_marked(self, column: Column) -> bool:
        """Return whether it is known who usually logs a name, and whether the writer still waits for others."""
        is_regular = column.name.rpartition("_")[0] in REGULAR or column.name in REGULAR
        return is_regular and column.identifies_ranks and self.writer.rank not in self.facts.left_alone

    def _of_axis_calls(self) -> Iterator[Violation]:
        """Check that no call of the axis alone is lost if it is the lowest rank's: its value may stand in another row.

        Which row has those of other ranks is open, because the axis is no cell.
        """
        is_lowest = self.writer.rank == min((call.rank for call in self.calls), default=None)
        gone = self.facts.broken | self.facts.disk_full
        if self.writer.rank in gone or not self.writer.primary or not is_lowest:
            return
        at = {(written.row.get(self._x), written.row.get(AXIS)) for written in self._rows}
        for call in self.calls:
            is_alone = not call.cells and call.rank == self.writer.rank and call.is_certain
            if is_alone and not any(place in call.places and _is_close(x, call.axes.get(AXIS)) for place, x in at):
                yield Violation("lost", f"{call} has no row in the run of rank {self.writer.rank}")

    # --- calls and cells ----------------------------------------------------------------------------------------------

    @cached_property
    def _rows(self) -> list[_Written]:
        """All rows of the writer, in the order in which they were written."""
        return [self._read(row, number) for number, file in enumerate(self.files) for row in file.rows]

    def _read(self, row: Row, file: int) -> _Written:
        meanings = ((one, one.meaning(row[one.column])) for one in self.columns if one.column in row)
        standings = [_Standing(column, meaning) for column, meaning in meanings if meaning is not None]
        return _Written(row, file, int(row.get(DEGRADED, 0)), standings)

    def _made_as_well(self, call: Call) -> list[Call]:
        """Return the calls of lower ranks that share cells with a call, or with one that does."""
        return self._lower[call]

    @cached_property
    def _lower(self) -> dict[Call, list[Call]]:
        direct: dict[Call, dict[Call, None]] = {call: {} for call in self.calls}
        for name, cells in cells_of(self.calls).items():
            for ranks in cells.values() if name != NOTE else ():
                calls = [given.call for _, given in sorted(ranks.items())]
                for index, call in enumerate(calls):
                    direct[call].update(dict.fromkeys(calls[:index]))
        found: dict[Call, list[Call]] = {}
        for call in sorted(direct, key=lambda one: one.rank):
            further = (more for lower in direct[call] for more in found[lower])
            found[call] = list(dict.fromkeys((*direct[call], *further)))
        return found

    @cached_property
    def _of_axis_alone(self) -> list[Call]:
        return [call for call in self.calls if not call.cells and AXIS in call.axes]

    @property
    def _x(self) -> str:
        return LIGHTNING_X if self.spec.launcher == "lightning" else X

    def _violation(self, kind: str, written: _Written, text: str) -> Violation:
        return Violation(kind, f"row {brief(written.row)} of rank {self.writer.rank}'s run {text}")


def _agree(one: Call, other: Call) -> bool:
    """Return whether calls have the same step, and axes that agree: W&B makes one row of them.

    A call without a step ends the row that a call with one left open. A call without a value of the axis agrees with
    any.
    """
    is_same = (one.step is not None or other.step is not None) and not one.places.isdisjoint(other.places)
    return is_same and all(_is_close(one.axes[axis], other.axes[axis]) for axis in one.axes.keys() & other.axes.keys())


def _is_close(one: Any, other: Any) -> bool:
    is_known = isinstance(one, int | float) and isinstance(other, int | float)
    return is_known and math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)


def brief(row: Row) -> str:
    """Return the values of a row that a rank logged, and its places."""
    shown = {name: value for name, value in row.items() if name[0] != "_" and isinstance(value, int | float | str)}
    return str(shown)[:300]
