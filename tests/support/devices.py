"""The device of `tests/gpu`: the CUDA device of the machine, or a stand-in for it.

The stand-in computes on the host, but copies to the host arrive later: when an event is queried or waited for, in the
order of their stream, while the streams overtake each other. It can be held up, and it can fail.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import torch

cuda: Any = torch.cuda  # not all of it has types


class Cuda:
    def tensor(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor without dimensions on the device, made without waiting for it."""
        return torch.full((), value, device="cuda").to(dtype)

    def stream(self) -> contextlib.AbstractContextManager[object]:
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        return cuda.stream(side)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        """Keep the device from whatever is submitted to the current stream in the block, and check that it was kept."""
        self.work(2)
        event = cuda.Event()
        event.record()
        yield
        assert not event.query(), "the host waited for the device, or took two seconds for this"

    def work(self, seconds: float) -> None:
        """Submit work of about so many seconds to the current stream."""
        cuda._sleep(int(seconds * 1_800_000_000))  # cycles, at about 1.8 GHz

    def is_idle(self) -> bool:
        """Return whether the device has done all work of the current stream."""
        return bool(cuda.current_stream().query())

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            cuda.set_sync_debug_mode("default")

    def fail(self) -> None:
        """Make the device fail: now, or as soon as it gets there."""
        torch.zeros(1, device="cuda")[torch.full((1,), 7, device="cuda")]  # an assertion of the kernel


_WAITING = {"item", "cpu", "tolist", "numpy", "equal", "nonzero", "__repr__", "__format__", "__array__"} | {
    *("__float__", "__int__", "__bool__", "__index__", "__complex__"),
}


class OnStandIn(torch.Tensor):
    """A tensor on the stand-in."""

    stand_in: ClassVar[StandIn]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return torch.device("privateuseone:0")
        if func == torch.Tensor.is_cpu.__get__:  # type: ignore[attr-defined]  # a descriptor
            return False
        name = func.__name__
        if name in _WAITING:
            cls.stand_in.wait(name)
        if name == "to" and "cpu" in args[1:]:
            copy = torch.empty(args[0].shape, dtype=args[0].dtype)
            return cls.stand_in.copy(copy, args[0], is_async=given.get("non_blocking", False))
        if name == "copy_" and not isinstance(args[0], OnStandIn):
            return cls.stand_in.copy(args[0], args[1], is_async=given.get("non_blocking", False))
        if name == "cpu":
            return args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call]  # torch's


class StandIn:
    """A stand-in for a device; `used` makes it that of the process."""

    def __init__(self) -> None:
        self._streams: dict[int, deque[Callable[[], object]]] = {0: deque()}
        self.current = 0
        self._is_held = self._has_failed = False
        self._forbidden: int | None = None  # the thread that must not wait
        self._random = random.Random(0)
        self._lock = threading.RLock()
        self.copies: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()  # asynchronous ones that are in memory

    @contextlib.contextmanager
    def used(self) -> Iterator[StandIn]:
        OnStandIn.stand_in = self
        stand_in = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                self.at = 0.0 if enable_timing else -1.0

            def record(self, stream: int | None = None) -> None:
                self.is_over = False
                stand_in.submit(self._pass, stand_in.current if stream is None else stream)

            def _pass(self) -> None:
                self.is_over, self.at = True, time.perf_counter()

            def query(self) -> bool:
                stand_in.proceed()
                return self.is_over

            def synchronize(self) -> None:
                stand_in.wait("synchronize")
                while not self.query():
                    time.sleep(0.001)

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at) * 1000

        module = SimpleNamespace(Event=Event, current_stream=lambda _: stand_in.current)
        timed: dict[str, Any] = {
            "is_initialized": lambda: True,
            "Event": Event,
            "is_current_stream_capturing": lambda: False,
        }
        with (
            mock.patch.object(torch, "privateuseone", module, create=True),
            mock.patch.multiple(torch.cuda, **timed),
        ):
            yield self

    def submit(self, work: Callable[[], object], stream: int) -> None:
        with self._lock:
            self._check()
            self._streams.setdefault(stream, deque()).append(work)

    def copy(self, copy: torch.Tensor, source: torch.Tensor, *, is_async: bool) -> torch.Tensor:
        assert not source.requires_grad, "the copy would be part of a graph"
        if not is_async:
            self.wait("a copy that is not asynchronous")
        value = source.as_subclass(torch.Tensor).detach().clone()  # in the order of the stream
        copy.zero_() if copy.dtype == torch.bool else copy.fill_(2)  # it is not written yet
        weakref.finalize(copy, self._freed).atexit = False
        self.copies.add(copy)
        written = weakref.ref(copy)

        def arrive() -> None:
            if (target := written()) is not None:
                target.copy_(value)

        self.submit(arrive, self.current)
        if not is_async:
            while any(self._streams.values()):
                self.proceed()
        return copy

    def _freed(self) -> None:
        """Memory of an asynchronous copy was freed: once the device has failed, torch aborts."""
        if self._has_failed:
            os.abort()

    def proceed(self) -> None:
        """Do the next work of some stream, unless the device is held up."""
        with self._lock:
            self._check()
            busy = [stream for stream, works in self._streams.items() if works]
            if busy and not self._is_held:
                self._streams[self._random.choice(busy)].popleft()()

    def wait(self, how: str) -> None:
        self._check()
        assert self._forbidden != threading.get_ident(), f"{how} waits for the device"

    def _check(self) -> None:
        if self._has_failed:
            raise RuntimeError("the device has failed")

    # As of `Cuda`

    def tensor(self, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        self._check()
        return torch.full((), value).to(dtype).as_subclass(OnStandIn)

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        before, self.current = self.current, len(self._streams)
        self._streams[self.current] = deque()
        try:
            yield self.current
        finally:
            self.current = before

    @contextlib.contextmanager
    def occupied(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def work(self, seconds: float) -> None:
        self.submit(partial(time.sleep, seconds), self.current)

    def is_idle(self) -> bool:
        self.proceed()
        return not self._streams[self.current]

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        self._forbidden = threading.get_ident()
        try:
            yield
        finally:
            self._forbidden = None

    def fail(self) -> None:
        self._has_failed = True


Device: TypeAlias = Cuda | StandIn


@contextlib.contextmanager
def used(name: str) -> Iterator[Device]:
    if name == "cuda":
        yield Cuda()
    else:
        with StandIn().used() as stand_in:
            yield stand_in
