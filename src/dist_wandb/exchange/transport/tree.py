"""A generation with too many members for one gloo group, as a tree of groups (`transport`).

The members of a group reduce their numbers, and the first of them reduces the result with those of the other groups,
and so on. The members of the top group have the final result, and send it down again, from group to group. So all
members have the same bits. A member takes part in two collectives, and the first member of a group in two more for each
level above but the top, where it is one.

As in one group, nobody has a result before all members have contributed. If a member dies or stalls, the members of its
group detect it immediately, or within the timeout. They close their groups, which their neighbours detect in turn, up
and down the tree. Some members may then lack the result of the last round; their checkpoints settle that
(`membership`).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport import Group, GroupLayout, gloo, slices_of
from dist_wandb.exchange.transport.gloo import GlooGroup, too_much
from dist_wandb.job.ranges import numbers_in, spans_of
from dist_wandb.payloads.framing import Bytes

_MOST_TOGETHER = 2**32  # maximum bytes of all members together in a tally
_MOST_HELD = 2**26  # maximum bytes of all members that the first members of groups hold at once in a collect
_EXACT = 2.0**53  # a float64 represents all integers up to here
_CONTENT = struct.Struct("<IQ")  # precedes a content: how many spans of members sent it, and its length in bytes
_SPAN = struct.Struct("<II")  # the first and the last member of a span


class TreeGroup(Group):
    """A tree of groups, from the view of one member."""

    def __init__(
        self, groups: Sequence[GlooGroup], path: Sequence[GroupLayout], rank: int, size: int, timeout: float
    ) -> None:
        self.rank = rank
        self._groups = tuple(groups)  # of this member, from the lowest level up; it is first in all but the last
        self._below = [group for group, of_group in zip(groups, path, strict=True) if not of_group.is_top]
        self._size = size  # of the whole tree
        self.timeout: float = timeout  # how long a collective may wait for a member, in seconds

    def reduce_in_place(self, numbers: np.ndarray, summed: int) -> None:
        """As `Group`, in pieces, as in `collect`: up the tree, then down from the top group, which has the result."""
        size = gloo.PIECE // numbers.itemsize
        for start in range(0, numbers.size, size):
            piece, deadline = numbers[start : start + size], time.monotonic() + self.timeout
            for group in self._groups:
                group.reduce_in_place(piece, max(summed - start, 0), deadline)
                if group.rank:
                    break
            _hand_down(self._below, torch.from_numpy(piece), deadline)

    def tally(self, data: bytes) -> dict[bytes, frozenset[int]]:
        """As `Group`. First members of groups merge equal contents: the work grows with these, not with the members."""
        deadline = _deadline(self.timeout, self._lengths(len(data), gloo.MOST_GATHERED)[0])
        packed = _packed(self._contents(data, deadline))
        number = torch.tensor([len(packed)], dtype=torch.float64)
        _hand_down(self._groups, number, deadline)
        length = int(number)
        if length > _MOST_TOGETHER:
            raise too_much("All members of the group together", length, _MOST_TOGETHER)
        handed = bytearray(packed[:length].ljust(length, b"\0"))
        numbers = torch.frombuffer(handed, dtype=torch.uint8)
        for start in range(0, length, gloo.PIECE):
            _hand_down(self._groups, numbers[start : start + gloo.PIECE], deadline)
        return _unpacked(bytes(handed))

    def collect(self, *data: Bytes) -> list[bytes]:
        """As `Group`. All wait until member 0 has everything. The first members of groups pass it on in slices."""
        total, longest = self._lengths(sum(map(len, data)), gloo.MOST_COLLECTED)
        deadline = _deadline(self.timeout, total)
        found: list[Any] = [bytearray() for _ in range(0 if self.rank else self._size)]
        size = max(1, _MOST_HELD // self._size)
        for _, own in zip(range(0, longest, size), slices_of(data, size), strict=False):
            contents = self._contents(bytes(own), deadline)
            if found and frozenset[int]().union(*contents.values()) != set(range(self._size)):
                raise _malformed()
            for content, members in contents.items() if found else ():
                for member in members:
                    found[member] += content
        _hand_down(self._groups, torch.zeros(1), deadline)
        return found

    def _contents(self, data: bytes, deadline: float) -> dict[bytes, frozenset[int]]:
        """Return the distinct data of this member and of all members below it, each with these members."""
        contents = {data: frozenset((self.rank,))}
        for group in self._groups:
            together = b"".join(group.collect(_packed(contents), deadline=deadline))
            contents = _unpacked(together) if together else contents
        return contents

    def _lengths(self, length: int, most: int) -> tuple[int, int]:
        """Return the bytes of all members, and of the largest. Checked: nobody allocates more than is ever sent."""
        size = self._size
        (total,), (longest,) = self.reduce([float(length)], [float(length * size + size - 1 - self.rank)])
        if not 0 <= longest < _EXACT or not 0 <= total < _EXACT:
            raise ConfigurationError(
                "A member of the group announced an impossible number of bytes. Install the same version of "
                "dist_wandb on all ranks."
            )
        longest, member = divmod(int(longest), size)
        if longest > most:
            raise too_much(f"Member {size - 1 - member} of the group", longest, most)
        return int(total), longest

    def close(self) -> None:
        for group in self._groups:
            group.close()

    @property
    def collectives(self) -> int:
        return sum(group.collectives for group in self._groups)

    @property
    def bytes_given(self) -> int:
        return sum(group.bytes_given for group in self._groups)


def _deadline(timeout: float, length: int) -> float:
    return time.monotonic() + timeout * (2 + length // gloo.PIECE)  # each piece may take the timeout


def _packed(contents: Mapping[bytes, frozenset[int]]) -> bytes:
    parts = []
    for content, members in contents.items():
        spans = spans_of(members)
        parts += [_CONTENT.pack(len(spans), len(content)), *(_SPAN.pack(*span) for span in spans), content]
    return b"".join(parts)


def _unpacked(together: bytes) -> dict[bytes, frozenset[int]]:
    """Return the contents with their members. Equal ones are merged."""
    contents: dict[bytes, frozenset[int]] = {}
    start = 0
    while start + _CONTENT.size <= len(together):
        spans, length = _CONTENT.unpack_from(together, start)
        end = start + _CONTENT.size + spans * _SPAN.size + length
        if end > len(together):
            break
        members = numbers_in(_SPAN.iter_unpack(together[start + _CONTENT.size : end - length]))
        content = together[end - length : end]
        contents[content] = contents.get(content, frozenset()).union(members)
        start = end
    if start != len(together):
        raise _malformed()
    return contents


def _malformed() -> ConfigurationError:
    return ConfigurationError(
        "The data that the members of the group sent is malformed. Install the same version of dist_wandb on all ranks."
    )


def hand_down(groups: Sequence[GlooGroup], *, formed: bool, deadline: float) -> bool:
    """Receive from the members above whether all groups of the tree have formed, and pass it on to those below.

    `groups` are those of this member that have formed, from the lowest level up; it is the first member of each, unless
    these are all of its groups (`formed`). Raises BrokenError at the deadline (monotonic clock), and as in `Group`.
    """
    all_formed = torch.tensor([float(formed)])
    _hand_down(groups, all_formed, deadline)
    return bool(all_formed)


def _hand_down(groups: Sequence[GlooGroup], numbers: torch.Tensor, deadline: float) -> None:
    for group in reversed(groups):
        group.receive_from_first(numbers, deadline)
