"""Assign the members of a generation to groups: one group, or a tree of groups if there are too many members. Pure.

The lowest groups hold the ranks of a node. Their first ranks form the next level, and so on up to member 0. A group has
at most `FAN_OUT` members, because each of them connects to all others. All members compute the same tree from the same
input: their indices and nodes. A member needs only the addresses of its own groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

FAN_OUT = 16  # maximum number of members in a group


class GroupLayout(NamedTuple):
    """One group of the tree, from the view of one of its members."""

    level: int  # 0 for the lowest
    members: tuple[int, ...]  # their indices in the unit; the first represents the group in the next level
    group_rank: int  # index of this member in `members`

    @property
    def name(self) -> str:
        return f"{self.level}/{self.members[0]}"


class Tree(NamedTuple):
    """The tree of groups, from the view of one member."""

    # the groups of this member, from the lowest level upwards; it is the first member of all but the last
    path: tuple[GroupLayout, ...]
    levels: int  # number of levels of the whole tree


def tree_of(members: Sequence[int], nodes: Sequence[int], own: int, fan_out: int) -> Tree:
    """Return the tree of groups, from the view of the member `own`. Members are indices in the unit, ascending.

    `nodes` are the numbers of their nodes, any if unknown. Of 64 ranks on 8 nodes, rank 24 is in the group of its node
    (ranks 24 to 31) and in the group of ranks 0, 8, ..., 56.
    """
    if len(members) <= fan_out:
        return Tree((GroupLayout(0, tuple(members), members.index(own)),), 1)
    heads: dict[int, list[int]] = {}
    for member, node in zip(members, nodes, strict=True):
        heads.setdefault(node, []).append(member)
    path: list[GroupLayout] = []
    levels = 0
    while len(heads) > 1 or any(len(of_node) > 1 for of_node in heads.values()):
        if all(len(of_node) == 1 for of_node in heads.values()):
            heads = {0: sorted(head for (head,) in heads.values())}
        next_heads: dict[int, list[int]] = {}
        for node, of_node in heads.items():
            groups = _split(of_node, fan_out)
            next_heads[node] = [group[0] for group in groups]
            own_groups = (group for group in groups if own in group and len(group) > 1)
            path += (GroupLayout(levels, tuple(group), group.index(own)) for group in own_groups)
        heads = next_heads
        levels += 1
    return Tree(tuple(path), levels)


def _split(heads: Sequence[int], fan_out: int) -> list[Sequence[int]]:
    """Split members into groups of nearly equal size: the smallest size that needs the fewest levels above."""
    levels = 1
    while fan_out**levels < len(heads):
        levels += 1
    most = next(size for size in range(1, fan_out + 1) if size**levels >= len(heads))
    number = math.ceil(len(heads) / most)
    bounds = [len(heads) * group // number for group in range(number + 1)]
    return [heads[start:end] for start, end in pairwise(bounds)]
