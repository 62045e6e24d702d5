"""How long sections of the script take on this rank: what `Session.timed` measures, until a row takes it along.

A section begins and ends on one thread. The host's clock measures it, and where CUDA is in use also events on the
current stream, which are read once the device has passed them, never by waiting; the longer one counts. Sums are those
of the sections that have ended since the last row with timings.

*Busy* is a rank in sections that do not wait for other ranks. A section inside another one of the same kind adds
nothing to it; one that waits, inside one that does not, is taken off, and the other way round it is added. What is
compared between ranks is the share of the time in which a rank is busy, because ranks in step take the same time for a
step, and the slow one waits least.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, ParamSpec, Protocol, TypeVar

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.checks import check_name
from dist_wandb.settings.reduction import BUSY, STEP, TIMES

P = ParamSpec("P")
R = TypeVar("R")

_OWN = ("step", "busy", "straggler_rank", "straggler_excess")
_STRANGE_ROWS = 3  # rows one after the other without the name that rows with timings have, until another name counts
_MOST_WAITING = 10_000  # sections whose events the device has not passed


class Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one."""


def device_event() -> Event | None:
    """An event on the current stream, where this process uses CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event  # type: ignore[no-any-return]


class Section:
    """One section of the script: use it in a ``with`` block, or as a decorator.

    Args:
        sections: Where its time counts.
        name: Its name.
        waits: Whether it waits for other ranks.
    """

    __slots__ = ("_began", "_event", "_inside", "_sections", "name", "waits")

    def __init__(self, sections: Sections, name: str, *, waits: bool) -> None:
        self.name, self.waits = name, waits
        self._sections = sections
        self._inside: Section | None = None
        self._event: Event | None = None
        self._began = 0

    def __enter__(self) -> None:
        sections = self._sections
        self._inside = sections.enter(self)
        self._event = sections.event()
        self._began = sections.clock()

    def __exit__(self, *exc_info: object) -> None:
        sections, inside = self._sections, self._inside
        took = sections.clock() - self._began
        is_like_outer = inside is not None and inside.waits == self.waits
        sign = 0 if is_like_outer or (inside is None and self.waits) else -1 if self.waits else 1
        sections.leave(self, inside)
        if self._event is None:
            sections.add(self.name, sign, took)
        else:
            sections.add_later(self.name, sign, took, self._event)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, each call of which is such a section.

        Raises:
            ConfigurationError: It is a coroutine or generator function: it returns before it has done its work.
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"timed({self.name!r}) was given the coroutine or generator function {function.__name__!r}, which "
                f"returns before it has done its work. Put `with run.timed({self.name!r}):` into it."
            )

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with Section(self._sections, self.name, waits=self.waits):
                return function(*args, **kwargs)

        return timed


class Sections:
    """The sections of this rank that have ended since the last row with timings.

    Args:
        clock: Nanoseconds of the host's clock.
        event: Makes an event on the current stream of a device; `None` where there is none.
    """

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, event: Callable[[], Event | None] = device_event
    ) -> None:
        self.clock, self.event = clock, event
        self._local = threading.local()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._sums: dict[str, int] = {}  # nanoseconds by name
        self._busy = 0
        self._waiting: deque[tuple[str, int, int, Event, Event | None]] = deque(maxlen=_MOST_WAITING)
        self._since: int | None = None
        self._marks = _Marks()

    def timed(self, name: str, rank: int, *, waits: bool) -> Section:
        """A section. The arguments are those of `Session.timed`, and this rank for messages.

        Raises:
            ConfigurationError: The name is not a text that W&B can store, or is of a timing that is written by itself.
        """
        if name not in self._known:
            check_name(name, rank)
            if name in _OWN:
                raise ConfigurationError(
                    f"timed was given the name {name!r} on rank {rank}, but {TIMES}{name} is written by itself. Use "
                    "another name."
                )
            self._known.add(name)
        return Section(self, name, waits=waits)

    def enter(self, section: Section) -> Section | None:
        """Begin a section on this thread; the one around it."""
        if self._since is None:
            self._since = self.clock()
        inside = getattr(self._local, "innermost", None)
        self._local.innermost = section
        return inside

    def leave(self, section: Section, inside: Section | None) -> None:
        """End a section on this thread; in a generator another one may have begun after it, and goes on."""
        if getattr(self._local, "innermost", None) is section:
            self._local.innermost = inside

    def add(self, name: str, sign: int, took: int) -> None:
        """Count a section that has ended.

        Args:
            name: Its name.
            sign: Whether its time is added to that in which the rank is busy (1), taken off (-1), or neither.
            took: Nanoseconds.
        """
        with self._lock:
            self._sums[name] = self._sums.get(name, 0) + took
            self._busy += sign * took

    def add_later(self, name: str, sign: int, took: int, began: Event) -> None:
        """Count a section that has ended on the host, once the device has passed its end."""
        self._waiting.append((name, sign, took, began, self.event()))

    def taken_along(self, names: Collection[str], step: int | None) -> dict[str, float]:
        """The timings that a row takes along, in seconds by name; none if it is not the row to take them.

        Args:
            names: What is logged in the row.
            step: The row's step.
        """
        if self._since is None or not self._marks.is_next(names, step):
            return {}
        while self._waiting and self._has_ended(*self._waiting[0]):
            self._waiting.popleft()
        now = self.clock()
        with self._lock:
            sums, self._sums = self._sums, {}
            busy, self._busy = self._busy, 0
        elapsed, self._since = max(1, now - self._since), now
        if not sums:
            return {}
        found = {f"{TIMES}{name}": took / 1e9 for name, took in sums.items()}
        return {**found, STEP: elapsed / 1e9, BUSY: min(1.0, max(0.0, busy / elapsed))}

    def _has_ended(self, name: str, sign: int, took: int, began: Event, ended: Event | None) -> bool:
        """Whether the device has passed a section, which counts then."""
        if ended is None or not ended.query():
            return ended is None
        self.add(name, sign, max(took, int(began.elapsed_time(ended) * 1e6)))
        return True


class _Marks:
    """Which rows take timings along: one of those that are logged at a step, and of a kind that comes again and again.

    So what one rank logs beside the others, under a guard, does not shift its timings against theirs.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._step: int | None = None
        self._strange = 0

    def is_next(self, names: Collection[str], step: int | None) -> bool:
        """Whether a row takes along what was measured."""
        if step is not None and step == self._step:
            return False
        if self._name is None or self._name not in names:
            self._strange += 1
            if self._name is not None and self._strange <= _STRANGE_ROWS:
                return False
            self._name = next(iter(names), None)
        self._strange, self._step = 0, step
        return True
