"""Collectives over a dedicated gloo process group. They can be interrupted at any time.

Waits are sliced, so that the thread can always be stopped. Bytes from peers are never unpickled.

A group that is closed while a collective is running is kept until the collective ends, because its destructor would
wait for it. Then it is destroyed promptly: if one of three or more members dies, the data that another member sends for
the failed collective is never read, and gloo's thread spins on it until the group is destroyed (``Pair::read`` and
``Loop::run`` in gloo/transport/tcp). A collective ends within the timeout.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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


def _options(forming: timedelta, address: str | None) -> Any:
    """Return options for a new group. An address takes private names of torch; without them gloo chooses one."""
    try:
        if address is not None:
            device = dist.ProcessGroupGloo.create_device(hostname=address)
            kinds: Any = dist.ProcessGroupGloo
            options = kinds._Options()  # noqa: SLF001  # see tests/unit/test_private_names.py
            options._timeout, options._devices = forming, [device]  # noqa: SLF001
            return options
    except (AttributeError, RuntimeError):  # a later torch renamed them, or the address does not exist
        pass
    return forming


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
        self._pending: list[Any] = []
        self._room = _LEAST_ROOM
        try:
            forming = min(timeout, forming)
            options = _options(timedelta(seconds=forming), address)
            # The constructor waits for the store without a timeout while the network is down.
            caller = TimedCaller(forming + FORMING_MORE, is_over, returns=True)
            self._group: Any = caller.call(lambda: dist.ProcessGroupGloo(store, rank, size, options))
        except (RuntimeError, UnansweredError) as error:
            raise BrokenError(str(error)) from error
        self.collectives: int = 0  # how many so far
        self.bytes_given: int = 0  # to these by this member

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        summed: Any
        largest: Any
        if self.size == _PAIR or len(sums) + len(maxima) <= _MOST_BY_ALL:
            summed, largest = self._reduce_by_all(np.array([*sums, *maxima], np.float64), len(sums))
        else:
            both = (torch.tensor(numbers, dtype=torch.float64) for numbers in (sums, maxima))
            summed, largest = self.reduce_tensors(*both)
        return summed.tolist(), largest.tolist()

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reduce float64 tensors on the host like `reduce`, perhaps in place. An empty one costs no collective."""
        if self.size == _PAIR:
            summed, largest = self._reduce_by_all(torch.cat((sums, maxima)).numpy(), sums.numel())
            return torch.from_numpy(summed), torch.from_numpy(largest)
        both = ((sums, self._timed(dist.AllreduceOptions())), (maxima, self._timed(dist.AllreduceOptions())))
        both[1][1].reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._wait(
            lambda group: [group.allreduce([tensor], options) for tensor, options in both if tensor.numel()],
            sums.nbytes + maxima.nbytes,
        )
        return sums, maxima

    def _reduce_by_all(self, own: np.ndarray[Any, Any], summed: int) -> list[np.ndarray[Any, Any]]:
        """Return the sums of the first `summed` numbers and the maxima of the others, the same bits on all members.

        Each sends its numbers to all others: one collective. For two members its traffic is as that of any other.
        """
        received = np.zeros((self.size, own.size))
        if own.size:
            self._all_gather([*map(torch.from_numpy, received)], torch.from_numpy(own))
        with np.errstate(all="ignore"):  # infinite and huge numbers
            return [reduce(np.add, received[:, :summed]), reduce(np.maximum, received[:, summed:])]

    def tally(self, data: bytes) -> dict[bytes, frozenset[int]]:
        """As `Group`: one collective, with room for twice the last longest data; longer data take another one."""
        room, longest = 0, self._room
        while longest > room:
            room, head = longest, _LENGTH.size
            framed = bytearray(_LENGTH.pack(len(data)) + data[:room].ljust(room, b"\0"))
            own = torch.frombuffer(framed, dtype=torch.uint8)
            received = list(torch.empty((self.size, head + room), dtype=torch.uint8).unbind())
            self._all_gather(received, own)
            contents, lengths = list[bytes](), list[int]()
            for tensor in received:
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
        each = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(each, torch.tensor([sum(map(len, data))]), deadline)
        lengths = [int(one) for one in each]
        _check(lengths, most)  # so that nobody allocates more than is ever sent
        found: list[Any] = [memory(length) for length in lengths] if self.rank == 0 else []
        slices = slices_of(data, PIECE)
        for start in range(0, max(lengths), PIECE):
            size = min(PIECE, max(lengths) - start)
            own = torch.frombuffer(next(slices).ljust(size, b"\0"), dtype=torch.uint8)
            received = [torch.empty(size, dtype=torch.uint8) for _ in found]
            self.send_to_first(own, received)
            for whole, tensor, length in zip(found, received, lengths, strict=False):
                end = max(start, min(start + size, length))
                whole[start:end] = tensor.numpy().data[: end - start]
        return found

    def _all_gather(self, received: list[torch.Tensor], own: torch.Tensor, deadline: float | None = None) -> None:
        # dist exports only the other options
        options = self._timed(distributed_c10d.AllgatherOptions(), deadline)  # type: ignore[attr-defined]
        self._wait(lambda group: [group.allgather([received], [own], options)], own.nbytes, deadline)

    def send_to_first(self, own: torch.Tensor, received: list[torch.Tensor], deadline: float | None = None) -> None:
        """Send this member's numbers to the first one, which gives an output for each; `None`: the group's timeout."""
        outputs, options = [received] if self.rank == 0 else [], self._timed(distributed_c10d.GatherOptions())
        self._wait(lambda group: [group.gather(outputs, [own], options)], own.nbytes, deadline)

    def receive_from_first(self, numbers: torch.Tensor, deadline: float | None = None) -> None:
        """Send numbers of the first member to all others, in place. The deadline may be later than the timeout."""
        options = self._timed(dist.BroadcastOptions(), deadline)
        self._wait(lambda group: [group.broadcast([numbers], options)], numbers.nbytes, deadline)

    def _timed(self, options: Any, deadline: float | None = None) -> Any:
        within = max(self.timeout, 0.0 if deadline is None else deadline - time.monotonic())
        options.timeout = timedelta(seconds=within)
        return options

    def close(self) -> None:
        """Detach from the other members. Running collectives are left alone: destroying them would wait for them."""
        group, self._group = self._group, None
        pending, self._pending = [work for work in self._pending if not work.is_completed()], []
        if pending and group is not None:
            kept = [group, *pending]  # with a reference that is never released: no destructor may run at exit either
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            undestroyed.append(kept)

    def _wait(self, call: Callable[[Any], list[Any]], size: int, deadline: float | None = None) -> None:
        if self._group is None:
            raise BrokenError("the group is closed")
        self.bytes_given += size
        deadline, failure = time.monotonic() + self.timeout if deadline is None else deadline, None
        try:
            self._pending = call(self._group)
            self.collectives += len(self._pending)
            for work in self._pending:
                if not self._ends(work, deadline):
                    failure = "waiting for the other members was stopped"
                    break
            else:
                self._pending = []
        except RuntimeError as error:  # gloo raises it for all failures
            failure = str(error)
        if failure is not None:  # raised here, because an error with gloo's traceback would keep the connections open
            raise BrokenError(failure)

    def _ends(self, work: Any, deadline: float) -> bool:
        """Wait in slices, so that waiting can be stopped. The end of a slice and a failure raise the same error."""
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:  # noqa: PERF203  # once per slice
                if work.is_completed():
                    work.wait()  # raises its error; otherwise it has completed just after the slice
                    return True
                if self._is_over() or (time.monotonic() > deadline and not work.is_completed()):
                    return False
            else:
                return True
