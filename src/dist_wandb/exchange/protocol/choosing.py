"""The calls that go into the table: what belongs together is taken together, when it is complete or old. Pure.

The calls that share cells are taken when none of their cells waits for another rank, or one of them is old; and each
party's calls in their order, because a rank's latest call proves that it is past the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, zip_longest
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.offers import Party, cells_and_axes
from dist_wandb.exchange.protocol.table import Table


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
    """Return the calls that share cells, directly or not."""
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
