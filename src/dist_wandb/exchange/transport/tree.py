"""The members of a generation as a tree of gloo groups (`layout`), where one group would have too many of them.

A member gives its numbers to the first of its group, which gives what they come to to the next level, and so on. The
result of member 0, the first of all, goes down again from group to group. So one member computes each result, and all
have the same bits. A member takes part in two collectives, the first of a group in two more in each level above.

As in one group, nobody has a result before all members have taken part. If a member dies or stalls, those of its group
see it at once, or within the time limit. They close their groups, by which their neighbours see it, and so on up and
down the tree. Then some members may have the result of the last round, and others not: their checkpoints settle that
(`membership.membership`).
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport import gloo
from dist_wandb.exchange.transport.gloo import Buffer, GlooGroup, too_much

_MOST_TOGETHER = 2**32  # bytes that all members together give to each of them at most
_EXACT = 2.0**53  # up to which a float64 is every integer
_MOST_BY_FIRST = 2**13  # numbers of each member that the first one reduces for all, where gloo could
_SERIAL = 2**15 - 1  # numbers: torch reduces more of them on threads, which the training's would have to compete with
_COUNT = struct.Struct("<QQ")  # before a content: how many members gave it, and how many bytes follow
_HEAD = struct.Struct("<IQ")  # before what a member gives: which member it is, and how many bytes follow


class _Table(NamedTuple):
    """Where the first of a group puts what its members give.

    Args:
        numbers: All of it.
        rows: What each member gives.
    """

    numbers: torch.Tensor
    rows: list[torch.Tensor]

    def reduce(self, into: torch.Tensor, summed: int) -> None:
        """Reduce the members' numbers, the first ones by sum and the others by maximum: in parts, on this thread."""
        members, size = self.numbers.shape
        most = max(_SERIAL // members, 1)
        for start in range(0, size, most):
            part, sums = slice(start, start + most), min(max(summed - start, 0), most)
            numbers, out = self.numbers[:, part], into[part]
            torch.sum(numbers[:, :sums], 0, out=out[:sums])
            if sums < out.numel():
                torch.amax(numbers[:, sums:], 0, out=out[sums:])


class TreeGroup:
    """The members of a tree, as one of them exchanges numbers with the others.

    Args:
        groups: Those that this member is in, from the lowest level upwards; it is the first in all but the last.
        rank: Index of this member.
        size: Number of members.
        timeout: How long a member may keep the others waiting, in seconds.
    """

    def __init__(self, groups: Sequence[GlooGroup], rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self._groups = tuple(groups)
        self._size = size
        self._timeout = timeout
        self._buffer = Buffer(0)
        self._tables: dict[GlooGroup, _Table] = {}

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """The sums and the maxima, number by number, of what all members give.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
        """
        own = array("d", [*sums, *maxima])
        if len(self._buffer.numbers) != len(own):
            self._buffer = Buffer(len(own))
        self._buffer.numbers[:] = own
        self._reduce(self._buffer.tensor, len(sums))
        reduced = self._buffer.numbers.tolist()
        return reduced[: len(sums)], reduced[len(sums) :]

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reduce`, with float64 tensors on the host, in place."""
        both = torch.cat((sums, maxima))
        self._reduce(both, sums.numel())
        sums.copy_(both[: sums.numel()])
        maxima.copy_(both[sums.numel() :])
        return sums, maxima

    def _reduce(self, numbers: torch.Tensor, summed: int) -> None:
        """Reduce numbers in place, the first ones by sum and the others by maximum: in pieces, as in `collect`."""
        size = gloo.PIECE // numbers.element_size()
        for start in range(0, numbers.numel(), size):
            piece = numbers[start : start + size]
            self._reduce_piece(piece, min(max(summed - start, 0), piece.numel()))

    def _reduce_piece(self, numbers: torch.Tensor, summed: int) -> None:
        deadline = time.monotonic() + self._timeout
        for group in self._groups:
            if group.rank:
                group.send_to_first(numbers, [], deadline)
                break
            table = self._table(group, numbers)
            group.send_to_first(numbers, table.rows, deadline)
            table.reduce(numbers, summed)
        self._hand_down(numbers, deadline)

    def _table(self, group: GlooGroup, numbers: torch.Tensor) -> _Table:
        table = self._tables.get(group)
        if table is None or table.numbers.shape[1] != numbers.numel():
            empty = torch.empty((group.size, numbers.numel()), dtype=numbers.dtype)
            table = self._tables[group] = _Table(empty, list(empty.unbind()))
        return table

    def _hand_down(self, numbers: torch.Tensor, deadline: float) -> None:
        """Give what member 0 has to all others, in place."""
        for group in reversed(self._groups):
            group.receive_from_first(numbers, deadline)

    def gather(self, data: bytes) -> list[bytes]:
        """What all members give, in their order.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
            ConfigurationError: A member, or all together, have more than anybody takes. All members raise it, and the
                group goes on.
        """
        length = self._length(data, gloo.MOST_GATHERED)
        if length > _MOST_TOGETHER:
            raise too_much("All members of the group together say that they send", length, _MOST_TOGETHER)
        if not length:
            return [b""] * self._size
        deadline = _deadline(self._timeout, length)
        length += self._size * _HEAD.size
        together = bytearray(self._collected(data, deadline)[:length].ljust(length, b"\0"))
        numbers = torch.frombuffer(together, dtype=torch.uint8)
        for start in range(0, length, gloo.PIECE):
            self._hand_down(numbers[start : start + gloo.PIECE], deadline)
        return _apart(bytes(together), self._size)

    def tally(self, data: bytes) -> dict[bytes, int]:
        """What members give, each content once, and how many gave it; in the same order on all of them.

        The first member of each group puts equal contents together, so what a member handles grows with how many
        different ones there are, not with the number of members.

        Raises:
            BrokenError: As of `gather`.
            ConfigurationError: Likewise.
        """
        deadline = _deadline(self._timeout, self._length(data, gloo.MOST_GATHERED))
        counted = {data: 1}
        for group in self._groups:
            together = b"".join(group.collect(_packed(counted), deadline))
            counted = _unpacked(together) if together else counted
        packed = bytearray(_packed(counted))
        number = torch.tensor([len(packed)], dtype=torch.float64)
        self._hand_down(number, deadline)
        length = int(number)
        if length > _MOST_TOGETHER:
            raise too_much("All members of the group together say that they send", length, _MOST_TOGETHER)
        packed = packed[:length].ljust(length, b"\0")
        numbers = torch.frombuffer(packed, dtype=torch.uint8)
        for start in range(0, len(packed), gloo.PIECE):
            self._hand_down(numbers[start : start + gloo.PIECE], deadline)
        return _unpacked(bytes(packed))

    def collect(self, data: bytes) -> list[bytes]:
        """What all members give, in their order, on member 0; nothing on the others, which wait until it has all.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
            ConfigurationError: A member has more than anybody takes. All members raise it, and the group goes on.
        """
        deadline = _deadline(self._timeout, self._length(data, gloo.MOST_COLLECTED))
        together = self._collected(data, deadline)
        self._hand_down(torch.zeros(1), deadline)
        return [] if self.rank else _apart(together, self._size)

    def _length(self, data: bytes, most: int) -> int:
        """How many bytes all members have together; nobody makes room for more than is ever sent."""
        length, size = float(len(data)), self._size
        (total,), (longest,) = self.reduce([length], [length * size + size - 1 - self.rank])
        if not 0 <= longest < _EXACT or not 0 <= total < _EXACT:
            raise ConfigurationError("A member of the group sends a number of bytes that cannot be.")
        longest, member = divmod(int(longest), size)
        if longest > most:
            raise too_much(f"Member {size - 1 - member} of the group says that it sends", longest, most)
        return int(total)

    def _collected(self, data: bytes, deadline: float) -> bytes:
        """What the members below this one have given, itself included, each part with its head."""
        together = _HEAD.pack(self.rank, len(data)) + data
        for group in self._groups:
            together = b"".join(group.collect(together, deadline))
        return together

    def close(self) -> None:
        """Detach from the others."""
        for group in self._groups:
            group.close()

    @property
    def collectives(self) -> int:
        """How many collectives this member has taken part in."""
        return sum(group.collectives for group in self._groups)

    @property
    def bytes_given(self) -> int:
        """How many bytes this member has given to them."""
        return sum(group.bytes_given for group in self._groups)


class OneGroup(TreeGroup):
    """Three members or more in one group.

    Few numbers go as in a tree, by the first member: gloo's allreduce, in which all members pass parts of them on in
    turn, takes ten times as long, and as much work. Where there are many, it spares the first member.

    Args:
        group: The group.
        timeout: How long a member may keep the others waiting, in seconds.
    """

    def __init__(self, group: GlooGroup, timeout: float) -> None:
        super().__init__([group], group.rank, group.size, timeout)
        self._group = group

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """As `TreeGroup.reduce`."""
        is_small = len(sums) + len(maxima) <= _MOST_BY_FIRST
        return super().reduce(sums, maxima) if is_small else self._group.reduce(sums, maxima)

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `GlooGroup.reduce_tensors`."""
        return self._group.reduce_tensors(sums, maxima)

    def gather(self, data: bytes) -> list[bytes]:
        """As `GlooGroup.gather`."""
        return self._group.gather(data)

    def tally(self, data: bytes) -> dict[bytes, int]:
        """As `TreeGroup.tally`."""
        return self._group.tally(data)

    def collect(self, data: bytes) -> list[bytes]:
        """As `GlooGroup.collect`."""
        return self._group.collect(data)


def _deadline(timeout: float, length: int) -> float:
    """Until when to wait for members between which so many bytes are on their way, as each piece may take long."""
    return time.monotonic() + timeout * (2 + length // gloo.PIECE)


def _apart(together: bytes, size: int) -> list[bytes]:
    """What each of some members gave."""
    parts: dict[int, bytes] = {}
    start = 0
    while start + _HEAD.size <= len(together):
        member, length = _HEAD.unpack_from(together, start)
        start += _HEAD.size
        parts[member] = together[start : start + length]
        start += length
    if start != len(together) or parts.keys() != set(range(size)):
        raise _malformed()
    return [parts[member] for member in range(size)]


def _packed(counted: Mapping[bytes, int]) -> bytes:
    return b"".join(_COUNT.pack(count, len(content)) + content for content, count in counted.items())


def _unpacked(together: bytes) -> dict[bytes, int]:
    """The contents of several members, with their counts; equal ones are put together."""
    counted: dict[bytes, int] = {}
    start = 0
    while start + _COUNT.size <= len(together):
        count, length = _COUNT.unpack_from(together, start)
        start += _COUNT.size + length
        content = together[start - length : start]
        counted[content] = counted.get(content, 0) + count
    if start != len(together):
        raise _malformed()
    return counted


def _malformed() -> ConfigurationError:
    return ConfigurationError(
        "What the members of the group sent does not have the form that it should have. Install the same version of "
        "dist_wandb on all ranks."
    )


def hand_down(groups: Sequence[GlooGroup], *, formed: bool, deadline: float) -> bool:
    """Send the members below whether all groups above them have formed, which those above send this member.

    Args:
        groups: Those that this member is in and that have formed, from the lowest level upwards.
        formed: Whether they are all that it is in; otherwise it is the first in each of them.
        deadline: Until when to wait for those above, by the monotonic clock.

    Returns:
        Whether all groups of the tree have formed.

    Raises:
        BrokenError: A member is gone or too late, or waiting was to end.
    """
    all_formed = torch.tensor([float(formed)])
    for group in reversed(groups):
        group.receive_from_first(all_formed, deadline)
    return bool(all_formed)
