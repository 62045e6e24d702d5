"""The interface of a group of members, which is also the group of a single member."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from dist_wandb.payloads.framing import Bytes

if TYPE_CHECKING:
    import torch


class BrokenError(Exception):
    """An exchange failed: a member is gone or too late, or waiting was stopped."""


undestroyed: deque[Callable[[], bool]] = deque()  # each destroys a closed group if it can, and returns whether it did
if hasattr(os, "register_at_fork"):  # a child process lacks the threads of these groups and would wait for them
    os.register_at_fork(after_in_child=undestroyed.clear)


def destroy_closed() -> None:
    """Destroy groups that were closed with running collectives that have ended; each is handled by one thread."""
    for _ in range(len(undestroyed)):
        with suppress(IndexError):  # another thread was faster
            destroy = undestroyed.popleft()
            if not destroy():
                undestroyed.append(destroy)


def members_of(contents: Iterable[bytes]) -> dict[bytes, frozenset[int]]:
    """Return the distinct contents, each with its members."""
    members: dict[bytes, list[int]] = {}
    for member, content in enumerate(contents):
        members.setdefault(content, []).append(member)
    return {content: frozenset(of_content) for content, of_content in members.items()}


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
        return list(sums), list(maxima)

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce float64 tensors on the host, like `reduce`; perhaps in place."""
        return sums, maxima

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
