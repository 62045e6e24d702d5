"""The plan of one round: the calls that it takes, given what all ranks offer, and their numbers in its lists. Pure.

The next calls of parties that share cells are one row, if no other rank is awaited for any of its cells. So are the
calls after them, as long as the names stay the same. Such rows need no state: in lockstep, these are all calls.

Of the others, what belongs together goes into the table together, when it is complete or old. The calls that share
cells are taken when none of their cells waits for another rank, or one of them is old; and each party's calls in their
order, because a rank's latest call proves that it is past the earlier ones.

The lists of a round hold the rows that are complete at once, then the cells of the calls that go into the table. A
value of the user's x axis is that of one call, of the lowest rank that gives one: it has one place in the sums, which
only that rank fills; behind the row's sums, or before those of all cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress, islice, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Block, Call, Intent, Key, Offer, Party, cells_and_axes
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import MAXIMA, NO_NUMBER, NOTHING, SUMS, Lanes, Number, number_at, placed
from dist_wandb.exchange.protocol.memory import Known, Owner, Row
from dist_wandb.exchange.protocol.table import Table


class Segment(NamedTuple):
    """Consecutive matched rows of the same form: calls with the same names, of the same parties."""

    rows: Block  # the calls of the lowest rank, the owner, and behind their names what others have besides
    ranks: tuple[Ranks, ...]  # the contributors to each name
    cells: tuple[int, ...]  # the indices of names that are cells
    axes: tuple[int, ...]  # the indices of names that are x axes
    # by lowest rank of a party, the owner first: the index of its first call in its offer, and the indices of its names
    # (`None`: of all)
    parts: Mapping[int, tuple[int, tuple[int, ...] | None]]
    lacks: Mapping[int, Ranks] = {}  # by index of a cell to which not all ranks contribute: those that are missing


class Taken(NamedTuple):
    """A call that goes into the table."""

    party: Party
    number: int  # in its offer, from 0
    call: Block
    cells: Mapping[Key, int]  # their indices in the call
    axes: Mapping[str, int]  # its x axes, and their indices in the call


class Plan:
    """The plan of one round, for one rank, which has offered `calls`."""

    def __init__(self, table: Table, offers: Mapping[Ranks, Offer], rank: int, calls: Sequence[Call]) -> None:
        self.offers = offers
        self.differing: dict[str, None] = {}  # from `apply`: x axes whose values differ between the ranks of a row
        self._table = table  # not changed before `apply`
        self._rank = rank
        self._calls = calls
        axes = frozenset(table.axes).union(*map(attrgetter("new_axes"), offers.values()))
        self.party: Party | None = None  # of this rank
        parties: dict[int, Party] = {}  # in the order of their lowest ranks, as the offers are
        for ranks, offer in offers.items():
            party = parties.setdefault(id(offer.blocks), Party(offer.blocks, min(ranks)))
            party.ranks |= ranks
            party.old = max(party.old, offer.old)
            self.party = party if rank in ranks else self.party
        self._parties = list(parties.values())
        self._segments: list[Segment] = []  # complete rows, which the next calls of the parties form
        match = partial(_from, table, self._parties, axes)
        while found := next(filter(None, map(match, self._parties)), None):  # from the first party again
            self._segments.append(found)
        left = list(filter(attrgetter("left"), self._parties))
        self.chosen: list[Taken] = _chosen(table, left, axes) if left else []  # the calls that go into the table
        # the cells of the table to which ranks contribute
        self.touched: dict[Key, None] = dict.fromkeys(chain.from_iterable(map(attrgetter("cells"), self.chosen)))
        self.waiting: Ranks = NOBODY.union(  # those on which something waits after the round
            *compress(offers, map(attrgetter("more"), offers.values())),
            *map(attrgetter("ranks"), filter(attrgetter("left"), left)),
        )

    def having(self, intent: Intent) -> Ranks:
        return NOBODY.union(*(ranks for ranks, offer in self.offers.items() if offer.intent is intent))

    # The lists

    def pack(self) -> Lanes:
        sums: list[float] = []
        maxima: list[float] = []
        lowest = self.party.lowest if self.party else -1
        for segment in self._segments:
            rows, names, slots = segment.rows, len(segment.rows.names), len(segment.axes)
            start, places = segment.parts.get(lowest, (None, None))
            if start is None:
                sums += [0.0] * ((SUMS * names + slots) * rows.number)
                maxima += [NOTHING] * (MAXIMA * names * rows.number)
                continue
            for call in self._calls[start : start + rows.number]:
                own_sums, own_maxima = call.lanes if places is None else placed(call.lanes, places, names)
                sums += own_sums
                maxima += own_maxima
                for at in segment.axes:  # its value is that of the lowest rank whose call has it
                    giver = next(rank for rank, (_, those) in segment.parts.items() if those is None or at in those)
                    sums.append(_of_axis(number_at(own_sums, own_maxima, at, names)) if giver == self._rank else 0.0)
        numbers: dict[Key, Number] = {}
        for one in self.chosen:
            if one.party is not self.party:
                sums += [0.0] * len(one.axes)
                continue
            call = self._calls[one.number]
            is_owner, names = one.party.lowest == self._rank, len(call.names)
            numbers.update((key, number_at(*call.lanes, at, names)) for key, at in one.cells.items())
            sums += [_of_axis(number_at(*call.lanes, at, names)) if is_owner else 0.0 for at in one.axes.values()]
        for key in self.touched:
            number = numbers.get(key, NO_NUMBER)
            sums += number[:SUMS]
            maxima += number[SUMS:]
        return sums, maxima

    def apply(
        self, sums: Sequence[float], maxima: Sequence[float], paths: dict[str, tuple[str, ...]]
    ) -> tuple[list[Row], dict[Owner, int]]:
        """Apply what the ranks have told, and the reduced lists; `paths` gets those of new names.

        Returns the complete rows, and the places of the calls in the table, in its order.
        """
        for ranks, offer in self.offers.items():
            for path in offer.new_names:
                name = ".".join(path)
                if len(path) > 1:
                    paths.setdefault(name, tuple(path))
                self._table.names.setdefault(name, len(self._table.names))
            self._table.axes.update(dict.fromkeys(offer.new_axes))
            if offer.interleaved:
                self._table.ranks.interleaved |= ranks
                self._table.ranks.version += 1
            for name, count in offer.counts.items():
                self._table.counts.setdefault(name, {}).update(dict.fromkeys(ranks, count))
        rest = iter(sums), iter(maxima)
        rows: list[Row] = []
        for segment in self._segments:
            rows += self._rows_of(segment, *rest)
        table, taken, places = self._table, self._table.taken, dict[Owner, int]()
        calls = table.calls
        for place, one in enumerate(self.chosen):
            axes, lowest = _axes(one.axes, rest[0]), one.party.lowest
            known = Known(one.call.step, one.call.x, axes, list(one.cells))
            for other in {table.cells[key].owner for key in known.keys if key in table.cells}:
                before = calls[other].axes if other in calls else {}
                self.differing.update((name, None) for name, value in axes.items() if before.get(name, value) != value)
            owner = lowest, taken.get(lowest, 0) + one.number
            places[owner] = place
            table.enter(owner, known, one.party.ranks)
        for key in self.touched:
            cell = table.cells[key]
            cell.number = cell.number.plus(Number(*islice(rest[0], SUMS), *islice(rest[1], MAXIMA)))
        for party in self._parties:
            if party.taken:
                for rank in party.ranks:
                    taken[rank] = taken.get(rank, 0) + party.taken
        return rows, places

    def _rows_of(self, segment: Segment, sums: Iterator[float], maxima: Iterator[float]) -> Iterator[Row]:
        table, cells, ranks = self._table, segment.cells, segment.ranks
        names, counts = segment.rows.names, tuple(map(len, ranks))
        missing, wide, high = len(NOBODY.union(*segment.lacks.values())), SUMS * len(names), MAXIMA * len(names)
        start, _ = segment.parts.get(self.party.lowest if self.party else -1, (None, None))
        owner, (owner_start, _) = next(iter(segment.parts.items()))
        first = table.taken.get(owner, 0) + owner_start
        for index in range(segment.rows.number):
            table.serial += 1
            lanes = [*islice(sums, wide)], [*islice(maxima, high)]
            for at in segment.axes:
                number = number_at(*lanes, at, len(names))
                if number.largest > -number.minus_smallest:
                    self.differing[names[at]] = None
            axes = _axes([names[at] for at in segment.axes], sums) if segment.axes else {}
            _, occurrences, step, _, x, *_ = segment.rows.from_call(index)
            row = Row(names, occurrences, step, x, lanes, axes, counts, missing, serial=table.serial)
            if len(cells) < len(names):  # without x axes
                row = row._replace(
                    names=tuple([names[cell] for cell in cells]),
                    occurrences=tuple([occurrences[cell] for cell in cells]),
                    lanes=(
                        [lanes[0][lane * len(names) + cell] for lane in range(SUMS) for cell in cells],
                        [lanes[1][lane * len(names) + cell] for lane in range(MAXIMA) for cell in cells],
                    ),
                    ranks=tuple([counts[cell] for cell in cells]),
                )
            if segment.lacks:
                lacks = [segment.lacks.get(cell, NOBODY) for cell in cells]
                table.memory.add((owner, first + index), row, [ranks[cell] for cell in cells], lacks)
            kept = () if start is None else self._calls[start + index].own
            if names or kept:
                yield row._replace(own=[*map(itemgetter(1), kept)]) if kept else row
        by_ranks: dict[Ranks, list[str]] = {}
        for cell in cells:
            by_ranks.setdefault(ranks[cell], []).append(names[cell])
        for those, of_those in by_ranks.items():
            table.ranks.note(of_those, those, table.serial, table.round, step)
            table.ranks.note_usual(of_those, those)


def _from(table: Table, parties: Sequence[Party], axes: frozenset[str], first: Party) -> Segment | None:
    """Match the next calls of a party with those of others; take them if they are complete rows."""
    if not first.left:
        return None
    group, reached = {first: first.left[0]}, [first.left[0]]  # with all parties that share cells, directly or not
    while reached and len(group) < len(parties):
        one = reached.pop()
        for party in parties:
            if party in group or not party.left or party.left[0].step != one.step:
                continue
            other = party.left[0]
            is_equal = one.names == other.names and one.occurrences == other.occurrences
            if one.names if is_equal else not {*one.cells(axes)}.isdisjoint(other.cells(axes)):
                group[party] = other
                reached.append(other)
    found = _joint(dict(sorted(group.items(), key=lambda one: one[0].lowest)) if len(group) > 1 else group, axes)
    if found is None:
        return None
    ranks, rows, number, lacks = table.ranks, found.rows, found.rows.number, {}
    for index in found.cells:
        name, those = rows.names[index], found.ranks[index]
        if len(those) == table.memory.size:
            continue
        if not ranks.present <= those and ranks.awaited(name, those, table.serial + 1)[0]:
            return None
        if any(name in party.names and not party.ranks <= those for party in parties):
            return None  # another rank offers it in a later call
        for at in range(number):
            if (key := rows.key(index, at)) in table.cells or key in table.memory.index:  # not the first of a cell
                number = at
                break
        lacks[index] = ranks.lacking(name, those, table.round + 1)
    if not number:
        return None
    for party in group:
        party.advance(number)
    return found._replace(rows=rows._replace(number=number), lacks=lacks)


def _joint(group: Mapping[Party, Block], axes: frozenset[str]) -> Segment | None:
    """Return the rows that these calls form; `None` if a name has different occurrences."""
    party, owner = next(iter(group.items()))
    if len(group) == 1:  # lockstep
        ranks = (party.ranks,) * len(owner.names)
        return Segment(owner, ranks, *cells_and_axes(owner.names, axes), {party.lowest: (party.taken, None)})
    occurrences = dict(zip(owner.names, owner.occurrences, strict=True))
    givers: dict[str, list[Ranks]] = {}
    for party, block in group.items():
        for name, occurrence in zip(block.names, block.occurrences, strict=True):
            if occurrences.setdefault(name, occurrence) != occurrence and name not in axes:
                return None
            givers.setdefault(name, []).append(party.ranks)
    names, sets = tuple(occurrences), dict[Ranks, Ranks]()
    index = {name: at for at, name in enumerate(names)}
    parts = {
        party.lowest: (party.taken, None if block.names == names else tuple([index[name] for name in block.names]))
        for party, block in group.items()
    }
    unions = [NOBODY.union(*givers[name]) for name in names]
    ranks = tuple([sets.setdefault(one, one) for one in unions])  # equal ones are one object
    blocks = group.values()
    has_one_stride = len({block.stride for block in blocks if block.number > 1}) == 1
    number = min(block.number for block in blocks) if has_one_stride else 1
    rows = owner._replace(names=names, occurrences=tuple(occurrences.values()), number=number)
    return Segment(rows, ranks, *cells_and_axes(names, axes), parts)


def _chosen(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> list[Taken]:
    """Return the calls that go into the table, in order, and take them."""
    if _all_wait(table, parties, axes):
        return []
    calls: dict[Party, list[Taken]] = {party: [] for party in parties}
    givers: dict[Key, Ranks] = {}
    group_of: dict[Key, list[Taken]] = {}  # the calls that share cells, directly or not
    for party, mine in calls.items():
        for block in party.left:
            cells, of_axes = cells_and_axes(block.names, axes)
            at_axes = {block.names[at]: at for at in of_axes}
            for first in map(block.from_call, range(block.number)):
                keys = {Key(block.names[at], first.step, first.occurrences[at]): at for at in cells}
                call = Taken(party, party.taken + len(mine), first, keys, at_axes)
                mine.append(call)
                joined = {id(group_of[key]): group_of[key] for key in keys if key in group_of}
                group = max(joined.values(), key=len, default=[])
                moved = [call, *chain(*(one for one in joined.values() if one is not group))]
                group += moved
                for one in moved:
                    group_of.update(dict.fromkeys(one.cells, group))
                givers.update((key, givers.get(key, NOBODY) | party.ranks) for key in keys)
    waiting: list[list[Taken]] = []
    for group in {id(one): one for one in group_of.values()}.values():
        here, shared = NOBODY.union(*(call.party.ranks for call in group)), chain(*(call.cells for call in group))
        is_old = any(call.number < call.party.old for call in group)
        if not is_old and any(_awaited(table, key, givers[key], here) for key in dict.fromkeys(shared)):
            waiting.append(group)
    while waiting:
        group = waiting.pop()
        while group:  # until it is empty: it may come again
            call = group.pop()
            mine, ahead = calls[call.party], call.number - call.party.taken
            later, mine[ahead:] = mine[ahead:], []
            waiting += [group_of[key] for other in later for key in islice(other.cells, 1)]
    for party, mine in calls.items():
        party.advance(len(mine))
    return [call for ahead in zip_longest(*calls.values()) for call in ahead if call is not None]


def _all_wait(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> bool:
    """Return whether the next call of each party waits for others, and so all calls behind it: looks at these only."""
    if any(party.taken < party.old for party in parties):
        return False
    left = parties
    while left:  # with what these parties may give at most
        here = NOBODY.union(*(party.ranks for party in left))
        moving = []
        for party in left:
            for key in party.left[0].cells(axes):
                givers = NOBODY.union(*(one.ranks for one in left if key.name in one.names))
                if _awaited(table, key, givers, here):
                    break
            else:
                moving.append(party)
        if len(moving) == len(left):
            return False
        left = moving
    return True


def _awaited(table: Table, key: Key, givers: Ranks, here: Ranks) -> Ranks:
    """Return for whom a cell waits that these ranks give: with a new name, not for those that are `here` with others.

    The patience with new names comes later, in the table.
    """
    cell, ranks = table.cells.get(key), table.ranks
    those, serial = (givers, table.serial + 1) if cell is None else (givers | cell.ranks, cell.serial)
    rest, _ = ranks.awaited(key.name, those, serial, key.step)
    return rest if key.name in ranks.usual else rest - here


def _of_axis(number: Number) -> float:
    return number.plain if number.given else math.nan  # what is sent for no value


def _axes(names: Iterable[str], slots: Iterator[float]) -> dict[str, float]:
    values = [(name, next(slots)) for name in names]
    return {name: int(value) if value.is_integer() else value for name, value in values if not math.isnan(value)}
