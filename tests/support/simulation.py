"""A job of any number of ranks in one thread, on a simulated clock: the real code, in a simulated environment.

Each thread of each rank is a greenlet. When one waits, for a time, an event, a queue or another rank, the next one in
order of time runs, and the clock jumps to its time. So a job of thousands of ranks fits into one process, minutes of
waiting cost nothing, and the same seed replays the same schedule.

Replaced are the primitives by which threads wait (`time`, `threading`, `SimpleQueue`), the threads that call the store,
the store itself (a dictionary), and gloo's process group (messages between members, with delays). Everything above them
is the code of a real job: sessions, membership, forming, trees of `GlooGroup`, the rounds and their protocol.

Ranks can be killed by name, or at their n-th effect that others can see: a call of the store, or a message, such as
between two messages of one broadcast. A rank that is killed gives no notice. The others see its connections closed, as
with a real process; messages that it has sent still arrive.
"""

from __future__ import annotations

import functools
import gc
import heapq
import queue
import random
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wandb
from greenlet import GreenletExit, getcurrent, greenlet

from dist_wandb.exchange import interface
from dist_wandb.exchange.transport import destroy_closed, gloo
from dist_wandb.job import connection, timed_caller
from dist_wandb.job.timed_caller import UnansweredError

_GLOO_ADDRESS = 150  # bytes, about, that gloo puts into the store for each member


class Task(greenlet):  # type: ignore[misc]  # it ships no types
    def __init__(self, world: World, rank: int, function: Callable[[], Any]) -> None:
        super().__init__(function, world.hub)
        self.rank = rank
        self.turn = 0  # number of its waits: of several wake-ups, only the first one counts
        self.is_woken = False  # whether something else than the time has ended its last wait


class World:
    """The clock, and the schedule of tasks.

    Messages, and calls of the store, take so many seconds each; if that is random, up to twice as long.
    """

    def __init__(self, seed: int = 0, message: float = 0.0, call: float = 0.0, *, is_random: bool = False) -> None:
        self.hub = getcurrent()
        self.now = 0.0  # seconds
        self.random = random.Random(seed)
        self.messages: Counter[int] = Counter()  # that each rank has sent
        self.sent: Counter[int] = Counter()  # bytes that each rank has sent
        self.effects: Counter[int] = Counter()  # of each rank, that others could have seen
        self.dead: dict[int, float] = {}  # when ranks were killed
        self.doomed: dict[int, int] = {}  # by rank, the number of effects at which it is to die
        self.rooms: dict[str, Room] = {}
        self.groups_of: defaultdict[int, list[ProcessGroup]] = defaultdict(list)
        self.is_over = False
        self.closing = message  # seconds until others see that a connection was closed
        self._message, self._call, self._is_random = message, call, is_random
        self._due: list[tuple[float, int, Task, int, bool]] = []
        self._number = 0
        self._tasks: list[Task] = []
        self._next: Task | None = None  # whose turn it is, while the hub is to run it
        self._until: Callable[[], bool] = bool
        self._deadline = 0.0

    # Tasks

    def start(self, rank: int, function: Callable[[], Any], after: float = 0.0) -> Task:
        """Run a function on a rank, after a delay."""
        task = Task(self, rank, function)
        self._tasks.append(task)
        self._push(self.now + after, task, 0, is_woken=False)
        return task

    def run(self, until: Callable[[], bool] = lambda: False, within: float = float("inf")) -> None:
        """Run tasks until a condition holds, no task is left to run, or the time is over."""
        self._until, self._deadline = until, self.now + within
        while (task := self._choose() if self._next is None else self._next) is not None:
            self._next = None
            task.switch()

    def _choose(self) -> Task | None:
        """Return the task whose turn it is, and set the clock to its time; `None` if the run is over."""
        due, until, deadline = self._due, self._until, self._deadline
        while due and not until() and due[0][0] <= deadline:
            at, _, task, turn, is_woken = heapq.heappop(due)
            if task.turn == turn and not task.dead and task.rank not in self.dead:
                self.now, task.is_woken = at, is_woken
                task.turn += 1
                return task
        return None

    def pause(self, seconds: float | None) -> bool:
        """Wait, on a task, until it is woken; return whether it was woken before the time was over.

        The next task runs at once, not by way of the hub, which would take two switches. But the hub starts new tasks:
        if they started each other, their stacks would pile up.
        """
        task = getcurrent()
        if self.is_over or not isinstance(task, Task):
            raise GreenletExit
        task.turn += 1
        if seconds is not None:
            at = self.now + seconds if seconds > 0.0 else self.now
            self._push(at, task, task.turn, is_woken=False)
        following = self._choose()
        if following:  # it has begun
            if following is not task:
                following.switch()
        else:
            self._next = following
            self.hub.switch()
        return task.is_woken

    def wake(self, task: Task, at: float | None = None) -> None:
        self._push(self.now if at is None else at, task, task.turn, is_woken=True)

    def _push(self, at: float, task: Task, turn: int, *, is_woken: bool) -> None:
        self._number += 1
        heapq.heappush(self._due, (at, self._number, task, turn, is_woken))

    # Effects of a rank that others see

    def seen(self) -> None:
        """Count an effect of the running rank that others will see; kill the rank first if it is doomed."""
        task = getcurrent()
        if self.is_over:
            raise GreenletExit
        if isinstance(task, Task):
            rank = task.rank
            self.effects[rank] += 1
            if rank in self.doomed and self.effects[rank] == self.doomed[rank]:
                self.kill(rank)
                self.pause(None)

    def kill(self, *ranks: int) -> None:
        """Kill ranks, like SIGKILL."""
        self.dead.update(dict.fromkeys(ranks, self.now))
        for rank in ranks:
            for group in self.groups_of.pop(rank, ()):
                group.leave()

    def use_store(self) -> None:
        """Account for a call of the store, before it is made."""
        self.seen()
        if self._call:
            self.pause(self._delay(self._call))

    def message_takes(self) -> float:
        """Return the latency of the next message, in seconds."""
        return self._delay(self._message)

    def _delay(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.0, 2.0) if self._is_random else seconds

    def end(self) -> None:
        self.is_over = True
        for task in self._tasks:
            if task and not task.dead:
                task.throw()


# Primitives by which threads wait


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._world.wake(task)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set and timeout != 0.0:
            self._waiting.append(getcurrent())
            self._world.pause(timeout)
        return self._is_set


class _Queue:
    def __init__(self, world: World) -> None:
        self._world = world
        self._items: deque[Any] = deque()
        self._waiting: Task | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            self._world.wake(self._waiting)

    def get(self, timeout: float) -> Any:
        if not self._items:
            self._waiting = getcurrent()
            self._world.pause(timeout)
            self._waiting = None
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _Thread:
    def __init__(self, world: World, target: Callable[[], Any]) -> None:
        self._world, self._target = world, target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._world.start(getcurrent().rank, self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.dead

    def join(self, timeout: float) -> None:
        deadline = self._world.now + timeout
        while self.is_alive() and self._world.now < deadline:
            self._world.pause(0.1)


class _Instead:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


# The store


class Store:
    """The keys of a job in memory, or those below a prefix, as one rank uses them; its requests are counted."""

    def __init__(self, values: dict[str, bytes], counts: Counter[str], prefix: str = "") -> None:
        self.values, self.counts, self.prefix = values, counts, prefix

    def clone(self) -> Store:
        return self

    def below(self, prefix: str) -> Store:
        return Store(self.values, self.counts, f"{self.prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        self.values[self._count(key, value)] = _bytes(value)

    def get(self, key: str) -> bytes:
        value = self.values[self._count(key)]  # no rank waits for a missing key
        self.counts["bytes"] += len(value)
        return value

    def add(self, key: str, amount: int) -> int:
        key = self._count(key, b"12345678")
        self.values[key] = str(int(self.values.get(key, 0)) + amount).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        key, expected, desired = self._count(key, expected, desired), _bytes(expected), _bytes(desired)
        known = self.values.get(key)
        if known == expected or (known is None and not expected):
            known = self.values[key] = desired
        known = expected if known is None else known
        self.counts["bytes"] += len(known)
        return known

    def check(self, keys: list[str]) -> bool:
        return {self._count(key) for key in keys} <= self.values.keys()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(self._count(key), None) is not None

    def _count(self, key: str, *values: str | bytes) -> str:
        key = self.prefix + key
        self.counts["keys"] += 1
        self.counts["bytes"] += len(key) + sum(map(len, values))
        return key


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# gloo


class _Connecting:
    """A `TimedCaller` that forms a process group: it gives up soon after waiting is to end."""

    def __init__(self, world: World, _: float, is_over: Callable[[], bool], **_known: bool) -> None:
        self._world, self._is_over = world, is_over

    def call(self, form: Callable[[], ProcessGroup]) -> ProcessGroup:
        group, world = form(), self._world
        deadline = group.deadline
        while not group.is_connected():
            if world.now >= deadline:
                group.leave()
                raise UnansweredError("members have not connected")
            if self._is_over():
                deadline = min(deadline, world.now + timed_caller.LAST_CALL)
            group.room.waiting[group.rank] = getcurrent()
            world.pause(min(timed_caller._SLICE, deadline - world.now))
            group.room.waiting.pop(group.rank, None)
        group.connect()
        return group


class Room:
    """The place where the members of one process group leave messages for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here: set[int] = set()
        self.gone: dict[int, float] = {}
        self.mail: dict[tuple[int, int, int], tuple[float, Any]] = {}
        self.waiting: dict[int, Task] = {}


class _Work:
    """A collective in progress: it ends when the messages it needs have arrived, a sender is gone, or it times out."""

    def __init__(
        self, group: ProcessGroup, needs: Sequence[int], take: Callable[[list[Any]], None], within: timedelta
    ) -> None:
        self._group, self._needs, self._take = group, set(needs), take
        self._from, self._number = list(needs), group.number
        self._received: dict[int, Any] = {}
        self._deadline = group.world.now + within.total_seconds()
        self._failure: str | None = None

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""
        if self._group.world.is_over:
            return True
        room, now = self._group.room, self._group.world.now
        for member in list(self._needs):
            key = (self._number, member, self._group.rank)
            if key in room.mail and room.mail[key][0] <= now:
                self._received[member] = room.mail.pop(key)[1]
                self._needs.discard(member)
            elif key not in room.mail and room.gone.get(member, now + 1.0) <= now:
                self._failure = f"Connection closed by peer {member}"
        if self._needs and now >= self._deadline:
            self._failure = self._failure or "Timed out"
        return not self._needs or self._failure is not None

    def wait(self, within: timedelta | None = None) -> None:
        world, room, rank = self._group.world, self._group.room, self._group.rank
        until = self._deadline if within is None else min(self._deadline, world.now + within.total_seconds())
        while not self.is_completed():
            if world.now >= until:
                raise RuntimeError("Timed out waiting")
            known = [room.mail[key][0] for key in self._keys() if key in room.mail]
            known += [room.gone[member] for member in self._needs if room.gone.get(member, world.now) > world.now]
            room.waiting[rank] = getcurrent()
            world.pause(min([until, *known]) - world.now)
            room.waiting.pop(rank, None)
        if self._failure is not None and self._needs:
            raise RuntimeError(self._failure)
        take, self._take = self._take, _nothing
        take([self._received[member] for member in self._from])

    def _keys(self) -> list[tuple[int, int, int]]:
        return [(self._number, member, self._group.rank) for member in self._needs]


def _nothing(_: list[Any]) -> None:
    """Discard the messages, which were taken before."""


class ProcessGroup:
    """A `ProcessGroupGloo` of simulated ranks: no rank has a result before the ranks that it depends on have taken
    part.
    """

    def __init__(self, world: World, store: Store, rank: int, size: int, within: timedelta) -> None:
        self.world, self.rank, self.size, self.number = world, rank, size, 0
        self.owner = getcurrent().rank
        self.room = world.rooms.setdefault(store.prefix, Room(size))
        self.deadline = world.now + within.total_seconds()
        world.use_store()
        store.set(f"0/{rank}", bytes(_GLOO_ADDRESS))
        self.room.here.add(rank)
        world.groups_of[self.owner].append(self)
        for waiting in self.room.waiting.values():
            world.wake(waiting)
        self._store = store

    def is_connected(self) -> bool:
        return len(self.room.here) == self.size and not self.room.gone

    def connect(self) -> None:
        """Make its requests to the store: wait for each member's address, and read it."""
        for member in range(self.size):
            self._store.counts["keys"] += 1
            self._store.get(f"0/{member}")

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        (tensor,) = tensors
        is_sum = options.reduceOp == dist.ReduceOp.SUM

        def take(received: list[torch.Tensor]) -> None:
            given = torch.stack(received)
            tensor.copy_(given.sum(0) if is_sum else given.amax(0))

        self.number += 1
        self._send(tensor, range(self.size))
        return _Work(self, range(self.size), take, options.timeout)

    def alltoall_base(
        self, received: torch.Tensor, given: torch.Tensor, taken: list[int], parts: list[int], options: Any
    ) -> _Work:
        self.number += 1
        sent = torch.split_with_sizes(given, parts) if parts else given.unbind()
        for member in (*range(self.rank, self.size), *range(self.rank)):  # the order of gloo
            self._send(sent[member], [member])
        rows = torch.split_with_sizes(received, taken) if taken else received.unbind()
        return _Work(self, range(self.size), lambda arrived: _copy(arrived, rows), options.timeout)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        self.number += 1
        if self.rank:
            return _Work(self, [0], lambda given: _copy(given, tensors), options.timeout)
        self._send(tensors[0], range(1, self.size))
        return _Work(self, [], _nothing, options.timeout)

    def _send(self, tensor: torch.Tensor, members: Sequence[int]) -> None:
        world, room = self.world, self.room
        sent = tensor.clone()
        failed = None
        for member in members:
            arrives = world.now
            if member != self.rank:
                world.seen()
                if room.gone.get(member, world.now + 1.0) <= world.now:
                    failed = member
                    continue
                arrives += world.message_takes()
                world.messages[self.owner] += 1
                world.sent[self.owner] += sent.nbytes
            room.mail[self.number, self.rank, member] = (arrives, sent)
            if member in room.waiting and member != self.rank:
                world.wake(room.waiting[member], arrives)
        if failed is not None:
            raise RuntimeError(f"Connection closed by peer {failed}")

    def leave(self) -> None:
        """Close the connections."""
        if self.rank in self.room.gone:
            return
        seen = self.room.gone[self.rank] = self.world.now + self.world.closing  # not random: Python chooses the time
        for member, waiting in self.room.waiting.items():
            if member != self.rank:
                self.world.wake(waiting, seen)

    def __del__(self) -> None:
        if not self.world.is_over:
            self.leave()


def _copy(given: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> None:
    for target, tensor in zip(to, given, strict=True):
        target.copy_(tensor)


# Environment


@functools.lru_cache(maxsize=1)
def _uses(_: int) -> list[tuple[Any, str]]:
    """Return the product's modules and the names in them by which threads wait; cached until another is imported."""
    real = {"time": time, "threading": threading, "SimpleQueue": queue.SimpleQueue, "Flush": interface.Flush}
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("dist_wandb.")]
    return [
        (module, name)
        for module in ours
        for name, thing in real.items()
        if module is not timed_caller and vars(module).get(name) is thing
    ]


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Run the product's code in a world; process-wide registrations are skipped."""

    class Flush(_Event):
        def __init__(self, *, together: bool = False, commit: bool = True) -> None:
            super().__init__(world)
            self.together, self.commit = together, commit

    def call(_: Any, function: Callable[[], Any]) -> Any:
        world.use_store()
        return function()

    class PrefixStore:
        def __new__(cls, prefix: str, store: Store) -> Store:  # type: ignore[misc]
            return store.below(prefix)

    def thread(target: Callable[[], Any], **_: Any) -> _Thread:
        return _Thread(world, target)

    virtual_time = _Instead(time, monotonic=lambda: world.now, sleep=world.pause)
    virtual_threading = _Instead(threading, Event=lambda: _Event(world), Thread=thread)
    instead = {
        "time": virtual_time,
        "threading": virtual_threading,
        "SimpleQueue": lambda: _Queue(world),
        "Flush": Flush,
    }
    replaced: list[tuple[Any, str, Any]] = [(module, name, instead[name]) for module, name in _uses(len(sys.modules))]
    replaced += [
        (timed_caller, "time", virtual_time),
        (timed_caller.TimedCaller, "call", call),
        (connection, "connections_to", lambda _: set()),  # the store has no sockets to search for
        (interface, "live", []),
        (gloo, "TimedCaller", functools.partial(_Connecting, world)),
        (dist, "PrefixStore", PrefixStore),
        (dist, "ProcessGroupGloo", lambda *arguments: ProcessGroup(world, *arguments)),
    ]
    wandb_before = dict(vars(wandb))
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in replaced:
            patch.setattr(owner, name, value)
        with _no_collection():
            yield
            world.end()
            destroy_closed()
    vars(wandb).update(wandb_before)  # what sessions of killed ranks have left in place


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave garbage until the end of a job: it is then found at once, and not by many searches among living objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
