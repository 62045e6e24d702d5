"""What a round needs of the ranks that take part, and that of a rank which is alone."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class BrokenError(Exception):
    """An exchange did not come about: a member is gone or too late, or waiting was to end."""


undestroyed: deque[Callable[[], bool]] = deque()  # of closed groups: each destroys one if it can, and says if it did
if hasattr(os, "register_at_fork"):  # the threads of these groups are not in the child, which would wait for them
    os.register_at_fork(after_in_child=undestroyed.clear)


def destroy_closed() -> None:
    """Destroy groups that were closed while something was under way in them, as far as it has ended by now.

    Sessions call it on threads of their own: each group is in the hands of one thread at a time.
    """
    for _ in range(len(undestroyed)):
        with suppress(IndexError):  # another thread was quicker
            destroy = undestroyed.popleft()
            if not destroy():
                undestroyed.append(destroy)


class Group(Protocol):
    """The members of a generation, as one of them exchanges numbers with the others.

    Attributes:
        rank: Index of this member.
    """

    rank: int

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """The sums and the maxima, number by number, of what all members give."""

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reduce`, with float64 tensors on the host."""

    def gather(self, data: bytes) -> list[bytes]:
        """What all members give, in their order."""

    def tally(self, data: bytes) -> dict[bytes, int]:
        """What members give, each content once, and how many gave it; in the same order on all of them."""

    def collect(self, data: bytes) -> list[bytes]:
        """What all members give, in their order, on the first of them; nothing on the others."""

    def close(self) -> None:
        """Detach from the others."""


class Gathering:
    """Counts what it gathers: a group of few members."""

    def gather(self, data: bytes) -> list[bytes]:
        """As `Group.gather`."""
        raise NotImplementedError

    def tally(self, data: bytes) -> dict[bytes, int]:
        """As `Group.tally`."""
        return dict(Counter(self.gather(data)))


class Alone:
    """The group of one member."""

    rank = 0

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """What was given."""
        return list(sums), list(maxima)

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was given."""
        return sums, maxima

    def gather(self, data: bytes) -> list[bytes]:
        """What was given."""
        return [data]

    def tally(self, data: bytes) -> dict[bytes, int]:
        """What was given."""
        return {data: 1}

    def collect(self, data: bytes) -> list[bytes]:
        """What was given."""
        return [data]

    def close(self) -> None:
        """There is nobody else."""
