"""The calls that form complete rows at once, without any state: in lockstep, all calls. Pure.

The next calls of parties that share cells are one row, if no other rank is awaited for any of its cells. So are the
calls after them, as long as the names stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.offers import Block, Party, cells_and_axes
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
