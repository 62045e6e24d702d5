"""Collectives over a dedicated gloo process group. They can be interrupted at any time.

Waits are sliced, so that the thread can always be stopped. Bytes from peers are never unpickled. Collectives receive
into the given tensors: after a failure, torch's own allgather and gather free the tensor that gloo still receives into.

A group that is closed while a collective is running is kept until the collective ends, because its destructor would
wait for it. Then it is destroyed promptly: if one of three or more members dies, the data that another member sends for
the failed collective is never read, and gloo's thread spins on it until the group is destroyed (``Pair::read`` and
``Loop::run`` in gloo/transport/tcp). A collective ends within the timeout.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.transport import BrokenError, Group, members_of, slices_of, undestroyed
from dist_wandb.job.timed_caller import TimedCaller, UnansweredError
from dist_wandb.payloads.framing import Bytes, memory

if TYPE_CHECKING:
    from torch.distributed import Store

FORMING = 10.0  # seconds for all members to connect, after they have met
FORMING_MORE = 2.0  # additional seconds for gloo to report its own timeout
PIECE = 2**20  # bytes that each member sends at once; the timeout applies to each piece
MOST_GATHERED = 2**30  # maximum bytes that one member sends to all others: each of them allocates as much
MOST_COLLECTED = 2**30  # maximum bytes that one member sends to the first member, which alone allocates memory
_MOST_PASSED_ON = 2**36  # the same, for collected bytes of members that have each kept to the limit
_PAIR = 2  # members that need only one collective
_MOST_BY_ALL = 2**13  # numbers that each of three or more members sends to all others; gloo reduces more
_LEAST_ROOM = 512  # bytes for the data of a member in a tally
_LENGTH = struct.Struct("<Q")  # precedes these: their number
_SLICE = timedelta(milliseconds=100)  # between two checks whether to stop waiting


def _options(forming: float, address: str | None) -> Any:
    """Return options, with a timeout in seconds. An address takes private names of torch; without, gloo chooses one."""
    try:
        if address is not None:
            device = dist.ProcessGroupGloo.create_device(hostname=address)
            kinds: Any = dist.ProcessGroupGloo
            options = kinds._Options()  # noqa: SLF001  # see tests/unit/test_private_names.py
            options._timeout, options._devices = timedelta(seconds=forming), [device]  # noqa: SLF001
            return options
    except (AttributeError, RuntimeError):  # a later torch renamed them, or the address does not exist
        pass
    return timedelta(seconds=forming)


def too_much(sender: str, length: int, most: int) -> ConfigurationError:
    return ConfigurationError(
        f"{sender} announced {length:,} bytes, but the limit is {most:,}. Log smaller states or tables, and install "
        "the same version of dist_wandb on all ranks."
    )


def _check(lengths: Iterable[int], most: int) -> None:
    for member, announced in enumerate(lengths):
        if not 0 <= announced <= most:
            raise too_much(f"Member {member} of the group", announced, most)


class GlooGroup(Group):
    """A gloo process group over a store. One thread uses it. Raises BrokenError if the members do not connect."""

    def __init__(
        self,
        store: Store,  # the members connect through it; no one else uses its keys
        rank: int,
        size: int,
        timeout: float,  # how long a collective may wait for a member, in seconds
        is_over: Callable[[], bool],  # polled while waiting: whether to stop
        address: str | None = None,  # of this host, at which the others reach this member; `None` lets gloo choose
        forming: float = FORMING,  # how long the members may take to connect, in seconds
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout: float = timeout
        self._is_over = is_over
        self._running: Any = None  # the collective that has not ended
        self._room = _LEAST_ROOM
        try:
            forming = min(timeout, forming)
            # The constructor waits for the store without a timeout while the network is down.
            caller = TimedCaller(forming + FORMING_MORE, is_over, returns=True)
            # No variable holds the options: they would receive connections, into freed memory, after it has failed.
            group = caller.call(lambda: dist.ProcessGroupGloo(store, rank, size, _options(forming, address)))
            self._group: Any = group
        except (RuntimeError, UnansweredError) as error:
            raise BrokenError(str(error)) from error
        self.collectives: int = 0  # how many so far
        self.bytes_given: int = 0  # to these by this member

    def reduce_in_place(self, numbers: np.ndarray, summed: int, deadline: float | None = None) -> None:
        """As `Group`. Without numbers, this is no collective.

        If there are few numbers, or two members, whose traffic is the same as that of any other way, each member sends
        its numbers to all others: one collective, and the same bits on all of them.
        """
        sums, maxima = numbers[:summed], numbers[summed:]
        if self.size == _PAIR or numbers.size <= _MOST_BY_ALL:
            rows = self._all_gather(torch.from_numpy(numbers), deadline).numpy()
            with np.errstate(all="ignore"):  # infinite and huge numbers
                sums[:], maxima[:] = reduce(np.add, rows[:, :summed]), reduce(np.maximum, rows[:, summed:])
            return
        for part, operation in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(operation)
            if part.size:
                self._carry_out("allreduce", [torch.from_numpy(part)], options, size=part.nbytes, deadline=deadline)

    def tally(self, data: bytes) -> dict[bytes, frozenset[int]]:
        """As `Group`: one collective, with room for twice the last longest data; longer data take another one."""
        room, longest = 0, self._room
        while longest > room:
            room, head = longest, _LENGTH.size
            framed = bytearray(_LENGTH.pack(len(data)) + data[:room].ljust(room, b"\0"))
            own = torch.frombuffer(framed, dtype=torch.uint8)
            contents, lengths = list[bytes](), list[int]()
            for tensor in self._all_gather(own):
                found = tensor.numpy().tobytes()
                (length,) = _LENGTH.unpack_from(found)
                lengths.append(length)
                contents.append(found[head : head + length])
            _check(lengths, MOST_GATHERED)
            longest = max(lengths)
        self._room = max(_LEAST_ROOM, 1 << min(longest, PIECE).bit_length())
        return members_of(contents)

    def collect(self, *data: Bytes, deadline: float | None = None) -> list[bytes]:
        """As `Group`. Data is sent in slices, each of which meets the timeout on a slow network.

        Members that are still collecting their data are waited for until the deadline; it is given only if all know
        that no member exceeds its limit.
        """
        most = MOST_COLLECTED if deadline is None else _MOST_PASSED_ON
        lengths = self._all_gather(torch.tensor([sum(map(len, data))]), deadline).flatten().tolist()
        _check(lengths, most)  # so that nobody allocates more than is ever sent
        found: list[Any] = [memory(length) for length in lengths] if self.rank == 0 else []
        slices = slices_of(data, PIECE)
        for start in range(0, max(lengths), PIECE):
            size = min(PIECE, max(lengths) - start)
            own = torch.frombuffer(next(slices).ljust(size, b"\0"), dtype=torch.uint8)
            received = torch.empty((len(found), size), dtype=torch.uint8)
            self.send_to_first(own, received)
            for whole, tensor, length in zip(found, received, lengths, strict=False):
                end = max(start, min(start + size, length))
                whole[start:end] = tensor.numpy().data[: end - start]
        return found

    def _all_gather(self, own: torch.Tensor, deadline: float | None = None) -> torch.Tensor:
        """Return the numbers of all members, one row for each. Without numbers, this is no collective."""
        received = own.new_zeros((self.size, own.numel()))
        if own.numel():
            given, options = own.repeat(self.size, 1), dist.AllToAllOptions()
            self._carry_out("alltoall_base", received, given, [], [], options, size=own.nbytes, deadline=deadline)
        return received

    def send_to_first(self, own: torch.Tensor, received: torch.Tensor, deadline: float | None = None) -> None:
        """Send this member's numbers to the first one, which receives a row from each; the others give no rows."""
        lengths, parts = [len(received) and own.numel()] * self.size, [own.numel()] + [0] * (self.size - 1)
        everything = [received.view(-1), own, lengths, parts, dist.AllToAllOptions()]
        self._carry_out("alltoall_base", *everything, size=own.nbytes, deadline=deadline)

    def receive_from_first(self, numbers: torch.Tensor, deadline: float | None = None) -> None:
        """Send numbers of the first member to all others, in place. The deadline may be later than the timeout."""
        options = dist.BroadcastOptions()
        self._carry_out("broadcast", [numbers], options, size=numbers.nbytes, deadline=deadline)

    def close(self) -> None:
        """Detach from the other members. A running collective is left alone: destroying it would wait for it."""
        group, self._group = self._group, None
        work, self._running = self._running, None
        if group is not None and work is not None and not work.is_completed():
            kept = [group, work]  # with a reference that is never released: no destructor may run at exit either
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            undestroyed.append(kept)

    def _carry_out(self, name: str, *arguments: Any, size: int, deadline: float | None = None) -> None:
        """Start one of the group's collectives, with its options as the last argument, and wait until it ends."""
        if self._group is None:
            raise BrokenError("the group is closed")
        self.bytes_given += size
        now, failure = time.monotonic(), None
        deadline = now + self.timeout if deadline is None else deadline
        arguments[-1].timeout = timedelta(seconds=max(self.timeout, deadline - now))
        try:
            self._running = getattr(self._group, name)(*arguments)
            self.collectives += 1
            while self._running is not None and failure is None:
                try:
                    self._running.wait(_SLICE)
                    self._running = None
                except RuntimeError:  # noqa: PERF203  # the end of a slice and a failure raise the same error
                    if self._running.is_completed():
                        self._running.wait()  # raises its error; otherwise it has completed just after the slice
                        self._running = None
                    elif self._is_over() or (time.monotonic() > deadline and not self._running.is_completed()):
                        failure = "waiting for the other members was stopped"
        except RuntimeError as error:  # gloo raises it for all failures
            failure = str(error)
        if failure is not None:  # raised here, because an error with gloo's traceback would keep the connections open
            raise BrokenError(failure)
