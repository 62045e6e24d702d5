"""In which groups each member of a generation takes part: a tree of them where one would have too many members. Pure.

Ranks of a node come first, then the first ranks of the nodes, then the first of those, until one is left: member 0. A
group has at most `FAN_OUT` members, because each of them connects to all others. All members compute the same tree from
the same facts, their indices and nodes; of addresses each needs only those of its own groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

FAN_OUT = 16  # members of one group at most


class Place(NamedTuple):
    """A member's place in one group of the tree.

    Args:
        level: Of the group, counted from the lowest one.
        members: Indices in the unit of its members. The first takes part in the next level for all of them.
        position: Which of them this member is.
    """

    level: int
    members: tuple[int, ...]
    position: int

    @property
    def name(self) -> str:
        """Name of the group, unique in the tree."""
        return f"{self.level}/{self.members[0]}"


class Tree(NamedTuple):
    """The tree as one member sees it.

    Args:
        path: This member's places, from its node upwards. It is the first in all groups but the last.
        levels: How many levels the whole tree has.
    """

    path: tuple[Place, ...]
    levels: int


def tree_of(members: Sequence[int], nodes: Sequence[int], own: int, fan_out: int) -> Tree:
    """The tree of some members, as one of them sees it.

    Args:
        members: Their indices in the unit, ascending.
        nodes: For each of them a number of its node; any, where nodes are not known.
        own: The index of the one.
        fan_out: How many members a group has at most.

    Example:
        Of 64 ranks on 8 nodes, rank 24 is in the group of ranks 24 to 31, its node, and in that of ranks 0, 8, ..., 56.
    """
    if len(members) <= fan_out:
        return Tree((Place(0, tuple(members), members.index(own)),), 1)
    heads: dict[int, list[int]] = {}
    for member, node in zip(members, nodes, strict=True):
        heads.setdefault(node, []).append(member)
    path: list[Place] = []
    levels = 0
    while len(heads) > 1 or any(len(of_node) > 1 for of_node in heads.values()):
        if all(len(of_node) == 1 for of_node in heads.values()):
            heads = {0: sorted(head for (head,) in heads.values())}
        next_heads: dict[int, list[int]] = {}
        for node, of_node in heads.items():
            groups = _split(of_node, fan_out)
            next_heads[node] = [group[0] for group in groups]
            own_groups = (group for group in groups if own in group and len(group) > 1)
            path += (Place(levels, tuple(group), group.index(own)) for group in own_groups)
        heads = next_heads
        levels += 1
    return Tree(tuple(path), levels)


def _split(heads: Sequence[int], fan_out: int) -> list[Sequence[int]]:
    """Groups of about equal size: as small as they can be with as few levels above them as there can be."""
    levels = 1
    while fan_out**levels < len(heads):
        levels += 1
    most = next(size for size in range(1, fan_out + 1) if size**levels >= len(heads))
    number = math.ceil(len(heads) / most)
    bounds = [len(heads) * group // number for group in range(number + 1)]
    return [heads[start:end] for start, end in pairwise(bounds)]
