"""The calls that a round takes: those that form complete rows at once, and those that go into the table. Pure.

The next calls of parties that share cells are one row, if no other rank is awaited for any of its cells. So are the
calls after them, as long as the names stay the same. Such rows need no state: in lockstep, these are all calls.

Of the others, what belongs together is taken together, when it is complete or old. The calls that share cells are taken
when none of their cells waits for another rank, or one of them is old; and each party's calls in their order, because a
rank's latest call proves that it is past the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, zip_longest
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Block, Key, Party, cells_and_axes
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.table import Table


class Segment(NamedTuple):
    """Consecutive matched rows of the same form: calls with the same names, of the same parties."""

    rows: Block  # the calls of the lowest rank, the owner, and behind their names what others have besides
    ranks: tuple[Ranks, ...]  # the contributors to each name
    cells: tuple[int, ...]  # the indices of names that are cells
    axes: tuple[int, ...]  # the indices of names that are x axes
    starts: Mapping[int, int]  # by lowest rank of a party, the owner first: the index of its first call in its offer
    places: Mapping[int, tuple[int, ...] | None]  # in the same way: the index of each of its names
    lacks: Mapping[int, Ranks] = {}  # by index of a cell to which not all ranks contribute: those that are missing

    @property
    def owner(self) -> int:
        """The lowest rank."""
        return next(iter(self.starts))


def matched(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> list[Segment]:
    """Return the rows that the next calls of the parties form, and take these calls."""
    segments: list[Segment] = []
    while True:
        heads = {party: party.left[0] for party in parties if party.left}
        found = next((one for party in heads if (one := _from(party, heads, table, parties, axes))), None)
        if found is None:
            return segments
        segments.append(found)


def _from(
    first: Party, heads: Mapping[Party, Block], table: Table, parties: Sequence[Party], axes: frozenset[str]
) -> Segment | None:
    """Match the next calls of a party with those of others; take them if they are complete rows."""
    group = _partners(first, heads, axes)
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


def _partners(first: Party, heads: Mapping[Party, Block], axes: frozenset[str]) -> dict[Party, Block]:
    """Return the parties whose next calls share cells with that of one party, directly or not, by rank."""
    group = {first: heads[first]}
    left = {party: block for party, block in heads.items() if party is not first}
    reached = [heads[first]]
    while reached and left:
        block = reached.pop()
        for party, other in list(left.items()):
            if _share(block, other, axes):
                group[party] = left.pop(party)
                reached.append(other)
    return dict(sorted(group.items(), key=lambda one: one[0].lowest)) if len(group) > 1 else group


def _share(one: Block, other: Block, axes: frozenset[str]) -> bool:
    """Return whether the first calls of two blocks share a cell."""
    if one.step != other.step:
        return False
    if one.names == other.names and one.occurrences == other.occurrences:
        return bool(one.names)
    mine, others = (
        {(block.names[at], block.occurrences[at]) for at in cells_and_axes(block.names, axes)[0]}
        for block in (one, other)
    )
    return not mine.isdisjoint(others)


def _joint(group: Mapping[Party, Block], axes: frozenset[str]) -> Segment | None:
    """Return the rows that these calls form; `None` if a name has different occurrences."""
    owner = next(iter(group.values()))
    starts = {party.lowest: party.taken for party in group}
    if len(group) == 1:  # lockstep
        ((party, _),) = group.items()
        ranks = (party.ranks,) * len(owner.names)
        return Segment(owner, ranks, *cells_and_axes(owner.names, axes), starts, {party.lowest: None})
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
        party.lowest: None if block is owner else tuple([index[name] for name in block.names])
        for party, block in group.items()
    }
    unions = [NOBODY.union(*givers[name]) for name in names]
    ranks = tuple([sets.setdefault(one, one) for one in unions])  # equal ones are one object
    blocks = group.values()
    has_one_stride = len({block.stride for block in blocks if block.number > 1}) == 1
    number = min(block.number for block in blocks) if has_one_stride else 1
    rows = owner._replace(names=names, occurrences=tuple(occurrences.values()), number=number)
    return Segment(rows, ranks, *cells_and_axes(names, axes), starts, places)


class Taken(NamedTuple):
    """A call that goes into the table."""

    party: Party
    number: int  # in its offer, from 0
    step: int | None
    x: int
    cells: Mapping[Key, int]  # their indices in the call
    axes: Mapping[str, int]  # its x axes, and their indices in the call


def chosen(table: Table, parties: Sequence[Party], axes: frozenset[str]) -> list[Taken]:
    """Return the calls that go into the table, in order, and take them."""
    if _all_wait(table, parties, axes):
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
    while left:
        moving = [party for party in left if not _waits(party, left, table, axes)]
        if len(moving) == len(left):
            return False
        left = moving
    return True


def _waits(party: Party, left: Sequence[Party], table: Table, axes: frozenset[str]) -> bool:
    """Return whether the next call of a party waits for others, even if all parties that have calls left give it."""
    call, ranks = party.left[0], table.ranks
    for at in cells_and_axes(call.names, axes)[0]:
        name, cell = call.names[at], table.cells.get(call.key(at, 0))
        those, serial = (NOBODY, table.serial + 1) if cell is None else (cell.ranks, cell.serial)
        those = those.union(*(one.ranks for one in left if name in one.names))
        here = () if name in ranks.usual else (one.ranks for one in left)
        if ranks.awaited(name, those, serial)[0].difference(*here):
            return True
    return False


def _remaining(party: Party, axes: frozenset[str]) -> Iterator[Taken]:
    number = count(party.taken)
    for block in party.left:
        names, (cells, of_axes) = block.names, cells_and_axes(block.names, axes)
        at_axes = {names[at]: at for at in of_axes}
        for call in map(block.from_call, range(block.number)):
            keys = {Key(names[at], call.step, call.occurrences[at]): at for at in cells}
            yield Taken(party, next(number), call.step, call.x, keys, at_axes)


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
    ranks, here = table.ranks, NOBODY.union(*(call.party.ranks for call in group))
    for key in dict.fromkeys(chain(*(call.cells for call in group))):
        cell = table.cells.get(key)
        those, serial = (givers[key], table.serial + 1) if cell is None else (givers[key] | cell.ranks, cell.serial)
        rest, _ = ranks.awaited(key.name, those, serial)
        if rest - (NOBODY if key.name in ranks.usual else here):  # the patience with new names comes later
            return False
    return True
