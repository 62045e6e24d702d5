"""Fused exchanges over a gloo process group of our own, which can be broken off at any time.

Waiting is sliced, so that the thread can always be stopped. No bytes of a peer are unpickled.

A group that is closed with a collective under way is kept until that has ended: its destructor would wait for it. It is
not kept longer: if a member of three or more dies, what another one sends to a collective that has failed by it is
never read, and gloo's thread spins on it until the group is destroyed (``Pair::read`` and ``Loop::run`` in
gloo/transport/tcp). Collectives end after the time limit at the latest.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice, starmap
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport.group import BrokenError, Gathering, undestroyed
from dist_wandb.store.timed_caller import TimedCaller, UnansweredError

if TYPE_CHECKING:
    from torch.distributed import Store

FORMING = 10.0  # seconds for members that have met to connect
FORMING_MORE = 2.0  # seconds beyond that, in which gloo should have noticed
PIECE = 2**20  # bytes that each member sends at once: the time limit is for a piece, not for all of it
MOST_GATHERED = 2**30  # bytes that one member gives to all others at most: each of them needs memory for as much
MOST_COLLECTED = 2**27  # likewise, where the first member alone does
_MOST_PASSED_ON = 2**36  # likewise, of what it has from others, each of which has kept to the limit
_PAIR = 2  # members that need one collective only
_SLICE = timedelta(milliseconds=100)  # how long to wait before looking whether waiting is to end


class Buffer:
    """Numbers that Python and gloo share. Tensors are slow for few numbers: each use gives Python's lock away.

    Args:
        length: How many there are.
    """

    def __init__(self, length: int) -> None:
        self.numbers: array[float] = array("d", bytes(8 * length))
        empty = torch.empty(0, dtype=torch.float64)
        self.tensor: Any = torch.frombuffer(self.numbers, dtype=torch.float64) if length else empty


def _options(forming: timedelta, address: str | None) -> Any:
    """What a group is formed with. Only private names give it an address; without them gloo finds its own."""
    try:
        if address is not None:
            device = dist.ProcessGroupGloo.create_device(hostname=address)
            kinds: Any = dist.ProcessGroupGloo
            options = kinds._Options()  # noqa: SLF001  # see tests/unit/test_private_names.py
            options._timeout, options._devices = forming, [device]  # noqa: SLF001
            return options
    except (AttributeError, RuntimeError):  # other names in a later torch; or no such address
        pass
    return forming


class _Collectives(NamedTuple):
    """The options of each collective that is used."""

    sum: Any
    max: Any
    gather: Any
    to_first: Any
    from_first: Any

    @classmethod
    def with_timeout(cls, timeout: timedelta) -> _Collectives:
        """Options of collectives that fail after a time."""
        summing, maximum = dist.AllreduceOptions(), dist.AllreduceOptions()
        summing.reduceOp, maximum.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp(dist.ReduceOp.MAX)
        gather = distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]  # dist itself exports the others only
        collectives = cls(summing, maximum, gather, distributed_c10d.GatherOptions(), dist.BroadcastOptions())
        for options in collectives:
            options.timeout = timeout
        return collectives


class _Undestroyed:
    """A closed group with collectives under way.

    The destructor waits for those, while it keeps all other Python threads waiting as well. So it may not run at the
    end of the process either: the group has one reference more, which nobody gives back then.

    Args:
        group: The group.
        pending: The collectives.
    """

    def __init__(self, group: Any, pending: list[Any]) -> None:
        self._kept = [group, *pending]
        for kept in self._kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def __call__(self) -> bool:
        """Destroy the group if all of its collectives have ended, and return whether it was destroyed."""
        if not all(work.is_completed() for work in self._kept[1:]):
            return False
        while self._kept:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._kept.pop()))
        return True


def too_much(who_sends: str, length: int, most: int) -> ConfigurationError:
    """The error of bytes that nobody takes."""
    return ConfigurationError(
        f"{who_sends} {length:,} bytes, but {most:,} are the most. Log smaller states or tables, and install the same "
        "version of dist_wandb on all ranks."
    )


def _lasting(options: Any, deadline: float | None) -> Any:
    """Options of a collective that may have to wait for longer than the time limit of the group."""
    within = timedelta(seconds=0.0 if deadline is None else deadline - time.monotonic())
    if within <= options.timeout:
        return options
    longer = type(options)()
    longer.timeout = within
    return longer


class GlooGroup(Gathering):
    """A gloo process group over a store, used by one thread.

    Args:
        store: Where the members find each other; its keys are theirs alone.
        rank: Index of this member.
        size: Number of members.
        timeout: How long a member may keep the others waiting, in seconds.
        is_over: Asked now and then while waiting for the others: whether to break off.
        address: Of this host, by which the others are to reach this member; `None` for what gloo finds.
        forming: How long the members get to connect, in seconds.

    Attributes:
        rank, size: As given.
        collectives: How many it has performed.
        bytes_given: How many this member has given to them.

    Raises:
        BrokenError: The members did not find each other.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        is_over: Callable[[], bool],
        address: str | None = None,
        forming: float = FORMING,
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._is_over = is_over
        self._pending: list[Any] = []
        self._buffers: dict[str, Buffer] = {}
        try:
            forming = min(timeout, forming)
            options = _options(timedelta(seconds=forming), address)
            # It asks the store, which has no time limit, for as long as the network is cut off.
            caller = TimedCaller(forming + FORMING_MORE, is_over, returns=True)
            self._group: Any = caller.call(lambda: dist.ProcessGroupGloo(store, rank, size, options))
        except (RuntimeError, UnansweredError) as error:
            raise BrokenError(str(error)) from error
        self._options = _Collectives.with_timeout(timedelta(seconds=timeout))
        self.collectives: int = 0
        self.bytes_given: int = 0

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        """The sums and the maxima, number by number, of what all members give.

        It takes two collectives, which are under way at once. Two members need only one, with no more traffic: each
        hands its numbers to the other, as they would in a ring.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
        """
        if self.size == _PAIR:
            return self._reduce_lists_between_two(sums, maxima)
        summed, largest = self._buffer("sums", len(sums)), self._buffer("maxima", len(maxima))
        summed.numbers[:], largest.numbers[:] = array("d", sums), array("d", maxima)
        self.reduce_tensors(summed.tensor, largest.tensor)
        return summed.numbers.tolist(), largest.numbers.tolist()

    def _reduce_lists_between_two(
        self, sums: Sequence[float], maxima: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        length = len(sums) + len(maxima)
        own, first, second = (self._buffer(use, length) for use in ("own", "first", "second"))
        own.numbers[:] = array("d", [*sums, *maxima])
        if length:
            both = [[first.tensor, second.tensor]]
            self._wait(lambda group: [group.allgather(both, [own.tensor], self._options.gather)], own.tensor.nbytes)
        pairs = zip(first.numbers, second.numbers, strict=True)
        return list(starmap(add, islice(pairs, len(sums)))), list(starmap(max, pairs))

    def _buffer(self, use: str, length: int) -> Buffer:
        """The buffer for a use."""
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer.numbers) != length:
            buffer = self._buffers[use] = Buffer(length)
        return buffer

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `reduce`, with float64 tensors on the host, in place; an empty one costs no collective."""
        if self.size == _PAIR:
            return self._reduce_between_two(sums, maxima)
        wanted = [
            (tensor, how) for tensor, how in ((sums, self._options.sum), (maxima, self._options.max)) if tensor.numel()
        ]
        self._wait(
            lambda group: [group.allreduce([tensor], how) for tensor, how in wanted], sums.nbytes + maxima.nbytes
        )
        return sums, maxima

    def _reduce_between_two(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.cat((sums, maxima))
        both = [torch.empty_like(own) for _ in range(_PAIR)]
        if own.numel():
            self._wait(lambda group: [group.allgather([both], [own], self._options.gather)], own.nbytes)
        first, second = both
        torch.add(first[: sums.numel()], second[: sums.numel()], out=sums)
        torch.maximum(first[sums.numel() :], second[sums.numel() :], out=maxima)
        return sums, maxima

    def gather(self, data: bytes) -> list[bytes]:
        """What all members give, in their order: two collectives.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
            ConfigurationError: A member has more than anybody takes. All members raise it, and the group goes on.
        """
        lengths = self._lengths(data, MOST_GATHERED)
        longest = max(lengths)
        if longest == 0:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        self._wait(lambda group: [group.allgather([received], [padded], self._options.gather)], longest)
        return [bytes(tensor.numpy()[:length]) for tensor, length in zip(received, lengths, strict=True)]

    def collect(self, data: bytes, deadline: float | None = None) -> list[bytes]:
        """What all members give, in their order, on the first of them; nothing on the others.

        It goes in pieces, so that each is within the time limit also where the network is slow, and only the first
        member needs memory for what the others give.

        Args:
            data: What this member gives.
            deadline: Until when to wait for members that have yet to collect it, by the monotonic clock; given where
                all members know already that nobody has too much.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
            ConfigurationError: A member has more than anybody takes. All members raise it, and the group goes on.
        """
        lengths = self._lengths(data, MOST_COLLECTED if deadline is None else _MOST_PASSED_ON, deadline)
        pieces: list[list[bytes]] = [[] for _ in lengths]
        for start in range(0, max(lengths), PIECE):
            size = min(PIECE, max(lengths) - start)
            piece = torch.frombuffer(bytearray(data[start : start + size].ljust(size, b"\0")), dtype=torch.uint8)
            received = [torch.empty(size, dtype=torch.uint8) for _ in lengths] if self.rank == 0 else []
            self.send_to_first(piece, received)
            for parts, tensor, length in zip(pieces, received, lengths, strict=False):
                parts.append(bytes(tensor.numpy()[: max(0, length - start)]))
        return [b"".join(parts) for parts in pieces] if self.rank == 0 else []

    def send_to_first(self, own: torch.Tensor, received: list[torch.Tensor], deadline: float | None = None) -> None:
        """Give numbers to the first member.

        Args:
            own: What this member gives.
            received: On the first member, where to put what each of them gives; empty on the others.
            deadline: Until when to wait for the others, by the monotonic clock; `None` for the time limit of the group.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
        """
        wanted = [received] if self.rank == 0 else []
        self._wait(lambda group: [group.gather(wanted, [own], self._options.to_first)], own.nbytes, deadline)

    def receive_from_first(self, numbers: torch.Tensor, deadline: float | None = None) -> None:
        """Give numbers of the first member to all others, in place.

        Args:
            numbers: What the first member gives; on the others, where to put it.
            deadline: As in `send_to_first`; it may be later than the time limit of the group.

        Raises:
            BrokenError: A member is gone or too late, or waiting was to end.
        """
        options = _lasting(self._options.from_first, deadline)
        self._wait(lambda group: [group.broadcast([numbers], options)], numbers.nbytes, deadline)

    def _lengths(self, data: bytes, most: int, deadline: float | None = None) -> list[int]:
        """How many bytes each member has; nobody makes room for more than is ever sent."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        own, options = torch.tensor([len(data)]), _lasting(self._options.gather, deadline)
        self._wait(lambda group: [group.allgather([lengths], [own], options)], own.nbytes, deadline)
        found = [int(length) for length in lengths]
        for member, length in enumerate(found):
            if not 0 <= length <= most:
                raise too_much(f"Member {member} of the group says that it sends", length, most)
        return found

    def close(self) -> None:
        """Detach from the others. What is under way still is left to itself: destroying it would wait for its end."""
        group, self._group = self._group, None
        pending, self._pending = [work for work in self._pending if not work.is_completed()], []
        if pending and group is not None:
            undestroyed.append(_Undestroyed(group, pending))

    def _wait(self, call: Callable[[Any], list[Any]], size: int, deadline: float | None = None) -> None:
        if self._group is None:
            raise BrokenError("the group is closed")
        self.bytes_given += size
        failure = self._failure(call, time.monotonic() + self._timeout if deadline is None else deadline)
        if failure is not None:  # raised here: an error with gloo's traceback would keep the connections open
            raise BrokenError(failure)

    def _failure(self, call: Callable[[Any], list[Any]], deadline: float) -> str | None:
        """Why collectives have not come to their end; `None` if they have."""
        try:
            self._pending = call(self._group)
            self.collectives += len(self._pending)
            for work in self._pending:
                if not self._ends(work, deadline):
                    return "waiting for the others was to end"
        except RuntimeError as error:  # what gloo raises, whatever has happened
            return str(error)
        self._pending = []
        return None

    def _ends(self, work: Any, deadline: float) -> bool:
        """Wait in slices, so that there is a way out of it; a slice that is over raises as a failure does."""
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:  # noqa: PERF203  # once in a slice
                if work.is_completed():
                    work.wait()  # raises what it failed with; or it came to its end just after the slice had
                    return True
                if self._is_over() or (time.monotonic() > deadline and not work.is_completed()):
                    return False
            else:
                return True
