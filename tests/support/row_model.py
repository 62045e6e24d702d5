"""What the rules of rows require: a judge of the rows that a unit has written, and of those that it wrote at last.

It knows all calls. A row must be one call's, of the lowest rank of its cells, with all that this call owns, and at its
place; and hold besides only what calls of higher ranks add that share cells with it. Numbers must be exact over the
ranks that contributed. Each number is a large odd integer, so the sum tells which ranks these are.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from row_units import Life, Logged, Unit

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.lanes import number_at
from dist_wandb.exchange.protocol.memory import Row


@dataclass
class Written:
    row: Row
    owner: Logged
    givers: dict[Key, frozenset[Life]]


class Judge:
    """Judges the rows of a unit: all that are written, and the last one with each cell."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._calls = list(unit.calls)
        self._parts: dict[Key, dict[Life, Logged]] = defaultdict(dict)
        for call in self._calls:
            for key in call.values:
                self._parts[key][call.life] = call
        self._logs: dict[str, set[int]] = defaultdict(set)  # by name: the ranks that ever log it
        for call in self._calls:
            for key in call.values:
                self._logs[key.name].add(call.rank)
        self.last: dict[Key, int] = {}
        self.written: list[Written] = []
        for row in unit.rows:
            if row.names:
                self._add(row)

    def _add(self, row: Row) -> None:
        keys = row.cells()
        assert len(set(row.names)) == len(keys), f"a name twice: {row}"
        givers = {key: self._givers(row, index, key) for index, key in enumerate(keys)}
        owners = {id(call): call for key in keys for call in [self._parts[key][min(givers[key])]]}
        lowest = min(call.rank for call in owners.values())
        (owner,) = [call for call in owners.values() if call.rank == lowest]
        assert (row.x, row.step) == (owner.x, owner.step), f"{row} has another x than {owner}"
        calls = [owner, *(self._parts[key][life] for key in keys for life in sorted(givers[key]))]
        axes = [(name, {one.axes[name] for one in calls if name in one.axes}) for one in calls for name in one.axes]
        assert row.axes.keys() == {name for name, _ in axes}, f"{row} lacks axes of {calls}"
        assert row.axes.items() >= owner.axes.items(), f"{row} has other axes than {owner}"
        assert all(row.axes[name] in values for name, values in axes), f"{row} has axes of none of {calls}"
        reached, others = [owner], [call for call in owners.values() if call is not owner]
        for call in reached:  # grows
            near = [other for other in others if other.values.keys() & call.values.keys()]
            reached += near
            others = [other for other in others if other not in near]
        assert not others, f"{row} is {owner}'s, but has values of {others}"
        number = len(self.written)
        for key in owner.values:
            if key not in givers:
                lower = any(life[0] < owner.rank for life in self._parts[key])
                assert lower or key in self.last or key in self._unit.lost, (
                    f"{row} is torn: {key} of {owner} is missing"
                )
        self.written.append(Written(row, owner, givers))
        self.last.update(dict.fromkeys(keys, number))

    def _givers(self, row: Row, index: int, key: Key) -> frozenset[Life]:
        """Return the ranks whose numbers are in a cell."""
        number = number_at(*row.lanes, index, len(row.names))
        parts = self._parts[key]
        for lives in itertools.combinations(parts, number.given):
            numbers = [(parts[life].values[key], parts[life].weight) for life in lives]
            if number.plain == sum(x for x, _ in numbers):
                assert number.weighted == sum(map(math.prod, numbers))
                assert number.weight == sum(weight for _, weight in numbers)
                assert number.largest == max(x for x, _ in numbers)
                assert number.minus_smallest == -min(x for x, _ in numbers)
                assert row.ranks[index] == len({rank for rank, _ in lives})
                return frozenset(lives)
        raise AssertionError(f"no ranks have given {key} of {row}: {parts}")

    def check_last(self, *, is_strict: bool = False) -> None:
        """Check the rows that are there in the end: each number is complete, and each call in one row.

        If it is strict, no row was written before all calls with its cells were there.
        """
        for key, parts in self._parts.items():
            if key not in self._unit.lost:
                assert key in self.last, f"{key} is not written"
                givers = self.written[self.last[key]].givers[key]
                assert givers == parts.keys(), f"{key} was written with {sorted(givers)} of {sorted(parts)}"
        for call in self._calls:
            owned = [key for key in call.values if min(self._parts[key])[0] == call.rank and key not in self._unit.lost]
            rows = {self.last[key] for key in owned}
            assert len(rows) <= 1, f"{call} is torn: {[self.written[row].row for row in rows]}"
            if owned and owned[0] not in self._unit.lost:
                self._check_place(call, owned, is_strict=is_strict)

    def _check_place(self, call: Logged, owned: list[Key], *, is_strict: bool) -> None:
        """Check that what a call adds to calls of lower ranks that stand in one row stands in this row."""
        home, last = self._home(call), self.written[self.last[owned[0]]]
        if last.owner is home:
            return
        if home is call:  # it stands beside another call, as was right when that row was written
            assert not is_strict, f"{owned} stand in the row of {last.owner}"
            return
        names = {key.name for key in owned}
        beside = [key for key in home.values if key in self.last and self._owner(key) is home]
        assert beside, f"{call} has no home"
        row = self.written[self.last[beside[0]]].row
        is_usual = any(home.rank in self._logs[name] for name in names)  # it will give it in a call of its own
        is_rival = not names.isdisjoint(row.names)  # two ranks add different cells of one name
        was_first = row.corrects and self.last[owned[0]] < self.last[beside[0]]  # it stood elsewhere, complete
        lower = {self.last[key] for key in call.values if key in self.last and self._owner(key).rank < call.rank}
        assert is_usual or is_rival or was_first or len(lower) > 1, f"{owned} do not stand beside {beside}"

    def _owner(self, key: Key) -> Logged:
        return self._parts[key][min(self._parts[key])]

    def _home(self, call: Logged) -> Logged:
        """Return the call in whose row this one's cells stand, without a step that of its rank's only such call."""
        lower = {id(one): one for key in call.values for one in [self._owner(key)] if one.rank < call.rank}
        homes = {id(home): home for one in lower.values() for home in [self._home(one)]}
        shared = [key for one in lower.values() for key in one.values if call.life in self._parts[key]]
        is_partner = call.step is not None or all(self._parts[key][call.life] is call for key in shared)
        return next(iter(homes.values())) if len(homes) == 1 and is_partner else call

    def check_flags(self) -> None:
        """Check that a row is flagged in the end if and only if it lacks a rank that died or did not come."""
        gone = self._unit.dead | self._unit.away | self._unit.absent
        for number, written in enumerate(self.written):
            if any(self.last[key] == number for key in written.givers):
                assert written.row.missing <= len(gone), f"{written.row} lacks more than {gone}"
        for call in self._unit.undone:  # that a rank would have made, or did not hand over before it died
            for key in call.values.keys() & self.last.keys():
                row = self.written[self.last[key]]
                if (
                    call.rank in gone
                    and key.name in self._unit.usual_at_death[call.life]
                    and key not in self._unit.lost
                ):
                    assert row.row.missing, f"{row.row} lacks rank {call.rank}, without a flag"

    def check_owns(self) -> None:
        """Check that each rank gets back what it kept for a row, once."""
        for rank in self._unit.members:
            life = rank, self._unit.lives[rank]
            kept = Counter(call.own for call in self._calls if call.life == life and call.own is not None)
            assert kept == Counter(self._unit.owns.get(life, ())), f"rank {rank} kept other things"
