"""Groups of members: their interface, which is also the group of a single member, and how they form a tree.

The members of a generation form one group, or a tree of groups if there are too many of them. The lowest groups hold
the ranks of a node. Their first ranks form the next level, and so on up to member 0. A group has at most `FAN_OUT`
members, because each of them connects to all others. All members compute the same tree from the same input: their
indices and nodes. A member needs only the addresses of its own groups.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.payloads.framing import Bytes

if TYPE_CHECKING:
    import numpy as np

FAN_OUT = 16  # maximum number of members in a group


class BrokenError(Exception):
    """An exchange failed: a member is gone or too late, or waiting was stopped."""


undestroyed: deque[list[Any]] = deque()  # closed groups, each with its running collectives
if hasattr(os, "register_at_fork"):  # a child process lacks the threads of these groups and would wait for them
    os.register_at_fork(after_in_child=undestroyed.clear)


def destroy_closed() -> None:
    """Destroy groups that were closed with running collectives that have ended; each is handled by one thread."""
    for _ in range(len(undestroyed)):
        with suppress(IndexError):  # another thread was faster
            kept = undestroyed.popleft()
            if all(work.is_completed() for work in kept[1:]):
                kept.clear()
            else:
                undestroyed.append(kept)


def members_of(contents: Iterable[bytes]) -> dict[bytes, frozenset[int]]:
    members: dict[bytes, list[int]] = {}
    for member, content in enumerate(contents):
        members.setdefault(content, []).append(member)
    return dict(zip(members, map(frozenset, members.values()), strict=True))


def slices_of(data: Iterable[Bytes], size: int) -> Iterator[bytearray]:
    """Yield the bytes of some pieces in slices of a size; the last one may be shorter, then empty ones follow."""
    found = bytearray()
    for piece in data:
        rest = memoryview(piece)
        while rest:
            taken = size - len(found)
            found += rest[:taken]
            rest = rest[taken:]
            if len(found) == size:
                yield found
                found = bytearray()
    yield found
    while True:
        yield bytearray()


class Group:
    """The members of a generation, from the view of one of them; as such, the group of a single member.

    All methods except `close` raise a `BrokenError` if a member is gone or too late, or waiting was stopped. `tally`
    and `collect` raise a `ConfigurationError` on all members if the data of a member, or of all together, exceeds a
    limit; the group stays usable then.
    """

    rank: int = 0  # index of this member

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the elementwise sums and maxima over all members."""
        import numpy as np

        numbers = np.array([*sums, *maxima], np.float64)
        self.reduce_in_place(numbers, len(sums))
        reduced: list[float] = numbers.tolist()
        return reduced[: len(sums)], reduced[len(sums) :]

    def reduce_in_place(self, numbers: np.ndarray, summed: int) -> None:
        """Reduce float64 numbers over all members: the first `summed` by sum, the others by maximum."""

    def tally(self, data: bytes) -> dict[bytes, frozenset[int]]:
        """Return the distinct data of all members, each with these members, in the same order on all members."""
        return {data: frozenset((0,))}

    def collect(self, *data: Bytes) -> list[bytes]:
        """Return the data of all members, in their order, on the first member, and an empty list on the others.

        A member gives its data in pieces, which it sends without joining them: only the first one needs memory for it.
        """
        return [b"".join(data)]

    def close(self) -> None:
        """Detach from the other members."""


class GroupLayout(NamedTuple):
    """One group of the tree, from the view of one of its members."""

    level: int  # 0 for the lowest
    members: tuple[int, ...]  # their indices in the unit; the first represents the group in the next level
    group_rank: int  # index of this member in `members`
    is_top: bool = True  # whether its members are the first ones of all others

    @property
    def name(self) -> str:
        return f"{self.level}/{self.members[0]}"


Tree = tuple[tuple[GroupLayout, ...], int]
"""A member's groups, from the lowest level upwards (it is the first member of all but the last), and all levels."""


def tree_of(members: Sequence[int], nodes: Sequence[int], own: int, fan_out: int | None = None) -> Tree:
    """Return the tree of groups, from the view of the member `own`. Members are indices in the unit, ascending.

    `nodes` are the numbers of their nodes, any if unknown. Of 64 ranks on 8 nodes, rank 24 is in the group of its node
    (ranks 24 to 31) and in the group of ranks 0, 8, ..., 56.
    """
    fan_out = FAN_OUT if fan_out is None else fan_out
    if len(members) <= fan_out:
        return (GroupLayout(0, tuple(members), members.index(own)),), 1
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
    return tuple(one._replace(is_top=one.level == levels - 1) for one in path), levels


def _split(heads: Sequence[int], fan_out: int) -> list[Sequence[int]]:
    """Split members into groups of nearly equal size: the smallest size that needs the fewest levels above."""
    levels = 1
    while fan_out**levels < len(heads):
        levels += 1
    most = next(size for size in range(1, fan_out + 1) if size**levels >= len(heads))
    number = math.ceil(len(heads) / most)
    bounds = [len(heads) * group // number for group in range(number + 1)]
    return [heads[start:end] for start, end in pairwise(bounds)]
