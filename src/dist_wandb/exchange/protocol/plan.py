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
from itertools import chain, count, islice, zip_longest
from operator import attrgetter
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Block, Call, Intent, Key, Offer, Party, cells_and_axes, parties_of
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import MAXIMA, NO_NUMBER, NOTHING, SUMS, Lanes, Number, number_at, placed
from dist_wandb.exchange.protocol.placing import Known, Owner, Remembered
from dist_wandb.exchange.protocol.table import Row, Table


class Segment(NamedTuple):
    """Consecutive matched rows of the same form: calls with the same names, of the same parties."""

    rows: Block  # the calls of the lowest rank, the owner, and behind their names what others have besides
    ranks: tuple[Ranks, ...]  # the contributors to each name
    cells: tuple[int, ...]  # the indices of names that are cells
    axes: tuple[int, ...]  # the indices of names that are x axes
    starts: Mapping[int, int]  # by lowest rank of a party, the owner first: the index of its first call in its offer
    places: Mapping[int, tuple[int, ...] | None]  # in the same way: the indices of its names; `None`: of all
    lacks: Mapping[int, Ranks] = {}  # by index of a cell to which not all ranks contribute: those that are missing

    @property
    def owner(self) -> int:
        return next(iter(self.starts))

    def giver(self, index: int) -> int:
        """Return the lowest rank whose calls have a name."""
        return next(rank for rank, places in self.places.items() if places is None or index in places)


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
        self._parties = parties_of(offers)
        self.party: Party | None = next((party for party in self._parties if rank in party.ranks), None)
        self._segments = _matched(table, self._parties, axes)
        self.chosen: list[Taken] = _chosen(table, self._parties, axes)  # the calls that go into the table
        self.touched: dict[Key, None] = {}  # the cells of the table to which ranks contribute
        for one in self.chosen:
            self.touched.update(dict.fromkeys(one.cells))

    def waiting(self) -> Ranks:
        """Return the ranks on which something waits after the round."""
        waiting = NOBODY
        for ranks, offer in self.offers.items():
            waiting |= ranks if offer.more else NOBODY
        for party in self._parties:
            waiting |= party.ranks if party.left else NOBODY
        return waiting

    def having(self, intent: Intent) -> Ranks:
        return NOBODY.union(*(ranks for ranks, offer in self.offers.items() if offer.intent is intent))

    # The lists

    def pack(self) -> Lanes:
        """Return this rank's lists: one to reduce by sum, one to reduce by maximum."""
        sums: list[float] = []
        maxima: list[float] = []
        for segment in self._segments:
            self._pack_segment(segment, sums, maxima)
        if self.chosen:
            self._pack_chosen(sums, maxima)
        return sums, maxima

    def _pack_segment(self, segment: Segment, sums: list[float], maxima: list[float]) -> None:
        lowest, rows = self.party.lowest if self.party else -1, segment.rows
        names, slots, start = len(rows.names), len(segment.axes), segment.starts.get(lowest)
        if start is None:
            sums += [0.0] * ((SUMS * names + slots) * rows.number)
            maxima += [NOTHING] * (MAXIMA * names * rows.number)
            return
        places = segment.places[lowest]
        mine = [segment.giver(at) == self._rank for at in segment.axes] if slots else []
        for call in self._calls[start : start + rows.number]:
            own_sums, own_maxima = call.lanes if places is None else placed(call.lanes, places, names)
            sums += own_sums
            maxima += own_maxima
            if slots:
                own = [_of_axis(number_at(own_sums, own_maxima, index, names)) for index in segment.axes]
                sums += [value if is_mine else 0.0 for value, is_mine in zip(own, mine, strict=True)]

    def _pack_chosen(self, sums: list[float], maxima: list[float]) -> None:
        mine: dict[Key, Number] = {}
        for one in self.chosen:
            if one.party is not self.party:
                sums += [0.0] * len(one.axes)
                continue
            call = self._calls[one.number]
            is_owner, names = one.party.lowest == self._rank, len(call.names)
            mine.update((key, number_at(*call.lanes, at, names)) for key, at in one.cells.items())
            sums += [_of_axis(number_at(*call.lanes, at, names)) if is_owner else 0.0 for at in one.axes.values()]
        for key in self.touched:
            number = mine.get(key, NO_NUMBER)
            sums += number[:SUMS]
            maxima += number[SUMS:]

    def apply(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[Row], dict[Owner, int]]:
        """Apply the reduced lists; return the complete rows, and the places of the calls in the table, in its order."""
        rest = iter(sums), iter(maxima)
        rows: list[Row] = []
        for segment in self._segments:
            rows += self._rows_of(segment, *rest)
        table, taken, places = self._table, self._table.taken, dict[Owner, int]()
        calls = table.placing.calls
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
        is_without_axes = len(cells) == len(names)
        start = segment.starts.get(self.party.lowest) if self.party else None
        owner, first = segment.owner, table.taken.get(segment.owner, 0) + segment.starts[segment.owner]
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
            if not is_without_axes:
                row = _without_axes(row, cells)
            if segment.lacks:
                lacks = [segment.lacks.get(cell, NOBODY) for cell in cells]
                givers = [ranks[cell] for cell in cells]
                table.memory.add(
                    Remembered((owner, first + index), *row[:4], row.axes, table.serial, givers, lacks, row.lanes)
                )
            kept = None if start is None else self._calls[start + index].own
            if names or kept is not None:
                yield row if kept is None else row._replace(own=(kept,))
        by_ranks: dict[Ranks, list[str]] = {}
        for cell in cells:
            by_ranks.setdefault(ranks[cell], []).append(names[cell])
        for those, of_those in by_ranks.items():
            table.ranks.note(of_those, those, table.serial, table.round, step)
            table.ranks.note_usual(of_those, those)


def _matched(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> list[Segment]:
    """Return the rows that the next calls of the parties form, and take these calls."""
    segments: list[Segment] = []
    while True:
        for party in parties:
            if party.left and (found := _from(party, table, parties, axes)):
                segments.append(found)
                break  # from the first party again
        else:
            return segments


def _from(first: Party, table: Table, parties: Sequence[Party], axes: frozenset[str]) -> Segment | None:
    """Match the next calls of a party with those of others; take them if they are complete rows."""
    group = _partners(first, parties, axes)
    found = _joint(group, axes)
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
        number = next((at for at in range(number) if not table.is_new(rows.key(index, at))), number)
        lacks[index] = ranks.lacking(name, those, table.round + 1)
    if not number:
        return None
    for party in group:
        party.advance(number)
    return found._replace(rows=rows._replace(number=number), lacks=lacks)


def _partners(first: Party, parties: Sequence[Party], axes: frozenset[str]) -> dict[Party, Block]:
    """Return the parties whose next calls share cells with that of one party, directly or not, by rank."""
    group = {first: first.left[0]}
    reached = [first.left[0]]
    while reached and len(group) < len(parties):
        block = reached.pop()
        for party in parties:
            if party.left and party not in group and _share(block, party.left[0], axes):
                group[party] = party.left[0]
                reached.append(party.left[0])
    return dict(sorted(group.items(), key=lambda one: one[0].lowest)) if len(group) > 1 else group


def _share(one: Block, other: Block, axes: frozenset[str]) -> bool:
    """Return whether the first calls of two blocks share a cell."""
    if one.step == other.step and one.names == other.names and one.occurrences == other.occurrences:
        return bool(one.names)
    return one.step == other.step and not {*one.cells(axes)}.isdisjoint(other.cells(axes))


def _joint(group: Mapping[Party, Block], axes: frozenset[str]) -> Segment | None:
    """Return the rows that these calls form; `None` if a name has different occurrences."""
    party, owner = next(iter(group.items()))
    if len(group) == 1:  # lockstep
        ranks, starts = (party.ranks,) * len(owner.names), {party.lowest: party.taken}
        return Segment(owner, ranks, *cells_and_axes(owner.names, axes), starts, {party.lowest: None})
    starts = {party.lowest: party.taken for party in group}
    occurrences = dict(zip(owner.names, owner.occurrences, strict=True))
    givers: dict[str, list[Ranks]] = {}
    for party, block in group.items():
        for name, occurrence in zip(block.names, block.occurrences, strict=True):
            if occurrences.setdefault(name, occurrence) != occurrence and name not in axes:
                return None
            givers.setdefault(name, []).append(party.ranks)
    names, sets = tuple(occurrences), dict[Ranks, Ranks]()
    index = {name: at for at, name in enumerate(names)}
    places = {
        party.lowest: None if block.names == names else tuple([index[name] for name in block.names])
        for party, block in group.items()
    }
    unions = [NOBODY.union(*givers[name]) for name in names]
    ranks = tuple([sets.setdefault(one, one) for one in unions])  # equal ones are one object
    blocks = group.values()
    has_one_stride = len({block.stride for block in blocks if block.number > 1}) == 1
    number = min(block.number for block in blocks) if has_one_stride else 1
    rows = owner._replace(names=names, occurrences=tuple(occurrences.values()), number=number)
    return Segment(rows, ranks, *cells_and_axes(names, axes), starts, places)


def _chosen(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> list[Taken]:
    """Return the calls that go into the table, in order, and take them."""
    if not any(map(attrgetter("left"), parties)) or _all_wait(table, parties, axes):
        return []
    calls = {party: list(_remaining(party, axes)) for party in parties}
    groups = _groups(list(chain(*calls.values())))
    givers: dict[Key, Ranks] = {}
    for call in chain(*calls.values()):
        for key in call.cells:
            givers[key] = givers.get(key, NOBODY) | call.party.ranks
    group_of = {(call.party, call.number): group for group in groups for call in group}
    waiting = [group for group in groups if not _is_complete(group, table, givers)]
    while waiting:
        group = waiting.pop()
        while group:  # until it is empty: it may come again
            call = group.pop()
            mine, ahead = calls[call.party], call.number - call.party.taken
            later, mine[ahead:] = mine[ahead:], []
            waiting += [group_of[other.party, other.number] for other in later]
    for party, mine in calls.items():
        party.advance(len(mine))
    return [call for ahead in zip_longest(*calls.values()) for call in ahead if call is not None]


def _all_wait(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> bool:
    """Return whether the next call of each party waits for others, and so all calls behind it: looks at these only."""
    left = [party for party in parties if party.left]
    if any(party.taken < party.old for party in left):
        return False
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


def _remaining(party: Party, axes: frozenset[str]) -> Iterator[Taken]:
    number = count(party.taken)
    for block in party.left:
        cells, of_axes = cells_and_axes(block.names, axes)
        at_axes = {block.names[at]: at for at in of_axes}
        for call in map(block.from_call, range(block.number)):
            keys = {Key(block.names[at], call.step, call.occurrences[at]): at for at in cells}
            yield Taken(party, next(number), call, keys, at_axes)


def _groups(calls: Sequence[Taken]) -> list[list[Taken]]:
    root = list(range(len(calls)))

    def root_of(number: int) -> int:
        while root[number] != number:
            root[number] = number = root[root[number]]
        return number

    first: dict[Key, int] = {}
    for number, call in enumerate(calls):
        for key in call.cells:
            root[root_of(number)] = root_of(first.setdefault(key, number))
    groups: dict[int, list[Taken]] = {}
    for number, call in enumerate(calls):
        groups.setdefault(root_of(number), []).append(call)
    return list(groups.values())


def _is_complete(group: Sequence[Taken], table: Table, givers: Mapping[Key, Ranks]) -> bool:
    if any(call.number < call.party.old for call in group):
        return True
    here = NOBODY.union(*(call.party.ranks for call in group))
    return not any(
        _awaited(table, key, givers[key], here) for key in dict.fromkeys(chain(*(one.cells for one in group)))
    )


def _without_axes(row: Row, cells: Sequence[int]) -> Row:
    names, (sums, maxima) = len(row.names), row.lanes
    return row._replace(
        names=tuple([row.names[cell] for cell in cells]),
        occurrences=tuple([row.occurrences[cell] for cell in cells]),
        lanes=(
            [sums[lane * names + cell] for lane in range(SUMS) for cell in cells],
            [maxima[lane * names + cell] for lane in range(MAXIMA) for cell in cells],
        ),
        ranks=tuple([row.ranks[cell] for cell in cells]),
    )


def _of_axis(number: Number) -> float:
    return number.plain if number.given else math.nan  # what is sent for no value


def _axes(names: Iterable[str], slots: Iterator[float]) -> dict[str, float]:
    """Return the values of the next x axes, as they are written."""
    values = [(name, next(slots)) for name in names]
    return {name: int(value) if value.is_integer() else value for name, value in values if not math.isnan(value)}
