"""How long sections of the script take on this rank: measured by `Session.timed`, and included in a later row.

A section begins and ends on one thread. It is measured by the host's clock and, if CUDA is in use, also by events on
the current stream. These are read once the device has passed them, never by waiting; the longer of the two times
counts. Sums cover the sections that have ended since the last row with timings.

A rank is *busy* in sections that do not wait for other ranks. A section inside another one of the same kind adds
nothing; a waiting section inside one that does not wait is subtracted, and the reverse is added. Ranks are compared by
the share of time in which they are busy: ranks that run in step take the same time for a step, and the slow one waits
least.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import elapsed, has_passed
from dist_wandb.payloads.scalars import check_name
from dist_wandb.session.stalls.watcher import signs
from dist_wandb.settings.reduction import BUSY, STEP, TIMES

if TYPE_CHECKING:
    from dist_wandb.session.session import Session

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OWN = ("step", "busy", "straggler_rank", "straggler_excess")
_UNMATCHED_ROWS = 3  # consecutive rows without the name that rows with timings have, until another name is used
_MOST_WAITING = 10_000  # sections with events that the device has not passed yet
Event: TypeAlias = Any  # a `torch.cuda.Event`
Part: TypeAlias = Literal["data", "forward", "backward", "optimizer"]


def device_event() -> Event | None:
    """Record an event on the current stream, if this process uses CUDA and captures no graph, which would record it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


# A section that has ended on the host: its name (`None` inside another section of the same name, which is counted
# instead); whether its time is added to the busy time (1), subtracted (-1), or neither (0); its nanoseconds.
_Ended: TypeAlias = tuple[str | None, int, int]


class Section(ContextDecorator):
    """One section of the script, to be used in a ``with`` block or as a decorator. It may be entered several times."""

    def __init__(self, sections: Sections, name: str, *, waits: bool) -> None:
        self._sections = sections
        self.name: str = name
        self.waits: bool = waits  # for other ranks

    def __enter__(self) -> None:
        self._sections.enter(self)

    def __exit__(self, *exc_info: object) -> None:
        self._sections.leave(self)

    def __call__(self, function: _Function) -> _Function:
        """Return the function, each call of which is timed as this section.

        Raises `ConfigurationError` for a coroutine or generator function, which returns before its work is done.
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"timed({self.name!r}) was given the coroutine or generator function {function.__name__!r}, which "
                f"returns before its work is done. Put `with run.timed({self.name!r}):` inside it."
            )
        return super().__call__(function)


class Sections:
    """The sections of this rank that have ended since the last row with timings."""

    def __init__(
        self, clock: Callable[[], int] = time.perf_counter_ns, event: Callable[[], Event | None] = device_event
    ) -> None:
        self.clock: Callable[[], int] = clock
        self.event: Callable[[], Event | None] = event
        # `entered`: the sections that this thread has entered, the innermost last; each with the time, in nanoseconds
        # of the host's clock, and the position of the device then; `None` without one
        self._local = threading.local()
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._sums: dict[str, int] = {}  # nanoseconds by name
        self._busy = 0  # nanoseconds
        self._waiting: deque[tuple[_Ended, Event, Event | None]] = deque()  # with their begin and end on the device
        self._since: int | None = None  # the last row with timings, or the first section
        # Which rows include timings: one for each step, of a kind that recurs, not those of a single rank.
        self._recurring: str | None = None  # a name that they have
        self._step: int | None = None  # of the last one
        self._unmatched = 0  # consecutive rows without that name

    def timed(self, name: str, rank: int, *, waits: bool) -> Section:
        """Create a section, as `Session.timed` does. Raises `ConfigurationError` for a name that cannot be used."""
        if name not in self._known:
            check_name(name, rank)
            if name in _OWN:
                raise ConfigurationError(
                    f"timed was given the name {name!r} on rank {rank}, but {TIMES}{name} is a built-in timing. Use "
                    "another name."
                )
            self._known.add(name)
        return Section(self, name, waits=waits)

    def enter(self, section: Section) -> None:
        entered: list[tuple[Section, int, Event | None]] = self._local.__dict__.setdefault("entered", [])
        event = self.event()
        signs.last = time.monotonic()
        began = self.clock()
        if self._since is None:
            self._since = began
        entered.append((section, began, event))

    def leave(self, section: Section) -> None:
        """End a section on this thread, usually the innermost; one in a generator may outlive those around it."""
        now = self.clock()
        signs.last = time.monotonic()
        entered: list[tuple[Section, int, Event | None]] = self._local.entered
        at = max(index for index, (one, *_) in enumerate(entered) if one is section)
        _, began, event = entered.pop(at)
        around = [one for one, *_ in entered[:at]]
        kind = around[-1].waits if around else True
        sign = 0 if section.waits == kind else -1 if section.waits else 1
        is_again = any(outer.name == section.name for outer in around)
        ended = None if is_again else section.name, sign, now - began
        if event is None:
            self._add(*ended)
            return
        if len(self._waiting) == _MOST_WAITING:  # the device is far behind: use the host's time
            self._add(*self._waiting.popleft()[0])
        self._waiting.append((ended, event, self.event()))

    def _add(self, name: str | None, sign: int, duration: int) -> None:
        with self._lock:
            if name is not None:
                self._sums[name] = self._sums.get(name, 0) + duration
            self._busy += sign * duration

    def due_timings(self, names: Collection[str], step: int | None) -> dict[str, float]:
        """Return the timings to include in a row that logs `names`, in seconds; none if it should not include them."""
        if self._since is None or (step is not None and step == self._step):
            return {}
        if self._recurring is None or self._recurring not in names:
            self._unmatched += 1
            if self._recurring is not None and self._unmatched <= _UNMATCHED_ROWS:
                return {}
            self._recurring = next(iter(names), None)
        self._unmatched, self._step = 0, step
        while self._waiting:  # add the sections that the device has passed
            (name, sign, duration), began, end = self._waiting[0]
            if end is not None and not (has_passed(began) and has_passed(end)):  # of other streams, perhaps
                break
            on_device = 0 if end is None else int(elapsed(began, end) * 1e6)
            self._add(name, sign, max(duration, on_device))
            self._waiting.popleft()
        now = self.clock()
        with self._lock:
            sums, self._sums = self._sums, {}
            busy, self._busy = self._busy, 0
        whole, self._since = max(1, now - self._since), now
        if not sums:
            return {}
        found = {f"{TIMES}{name}": duration / 1e9 for name, duration in sums.items()}
        return {**found, STEP: whole / 1e9, BUSY: min(1.0, max(0.0, busy / whole))}


def check_timings(timings: bool) -> bool:
    if not isinstance(timings, bool):
        raise ConfigurationError(f"timings={timings!r} is neither True nor False. Pass one of them.")
    return timings


class StepTimings:
    """Measures how long this rank is in each part of a step, on the training thread: an integration calls it.

    Gradients are reduced in ``backward`` and clipped after it, so it waits for other ranks. If parameters are sharded,
    ``forward`` and ``optimizer`` do, too, because layers and updates are gathered in them.
    """

    def __init__(self, session: Callable[[], Session | None], *, is_sharded: bool = False) -> None:
        self._session = session  # whose rows include the timings
        self._waiting: set[Part] = {"backward", "forward", "optimizer"} if is_sharded else {"backward"}
        self._thread: int | None = None
        self._current: Section | None = None

    @property
    def part(self) -> Part | None:
        return None if self._current is None else self._current.name  # type: ignore[return-value]

    def waits_in(self, part: Part) -> None:
        """Treat a part as one that waits for other ranks, from now on."""
        self._waiting.add(part)

    def enter(self, part: Part | None) -> None:
        """Enter a part, or leave the current one (`None`). Calls on a thread other than the first have no effect."""
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            return
        if self._current is not None:
            self._current.__exit__()
            self._current = None
        session = self._session() if part is not None else None
        if part is None or session is None:
            return
        self._thread = thread
        self._current = session.timed(part, waits=part in self._waiting)
        self._current.__enter__()

    def end(self) -> None:
        """Leave the current part. Another thread may train next."""
        self.enter(None)
        self._thread = None


class ForwardHook:
    """A hook that calls a function with its module. In copies and saved versions of the module it does nothing."""

    def __init__(self, call: Callable[[Any], None] | None = None) -> None:
        self._call = call

    def __call__(self, module: Any, *_: Any) -> None:
        if self._call is not None:
            self._call(module)

    def __reduce__(self) -> tuple[type[ForwardHook], tuple[()]]:
        return ForwardHook, ()  # without the function, which belongs to one training
