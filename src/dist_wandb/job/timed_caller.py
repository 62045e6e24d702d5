"""Timeouts for calls that have none, and polls with growing pauses.

A host whose network is cut off closes no connection. A call of the job's store then waits for as long as TCP retries,
about a quarter of an hour. Therefore each call is made on another thread and abandoned after a timeout. The timeout is
counted in slices of 0.1 s: a suspension of this process counts as one slice, however long it is. Until an abandoned
call has returned, further calls on its connection are refused immediately. So ranks that reach each other can exchange
numbers while the store is unreachable.

At the end of the process, abandoned calls get 3 s more to return. A call that returns while the interpreter shuts down
would abort the process.

Timeouts: `join_timeout` at the start; `join_timeout` + `peer_timeout` for membership (a rank that returns within that
time takes part again); half a second once the rank finishes; `STORE_PATIENCE` for the config and at the end, but
`finish_timeout` to find the writers that a run waits for; a second for optional information, which then counts as "no".
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from dist_wandb.errors import RendezvousError

_T = TypeVar("_T")
_log = logging.getLogger("dist_wandb")
_SLICE = 0.1  # seconds between two checks whether to stop waiting
STORE_PATIENCE = 2.0  # default timeout of the job's store, in seconds
LAST_CALL = 0.5  # seconds that a call gets once waiting is stopped, because last messages are sent then
_FIRST_PAUSE = 0.001  # seconds between the first two calls
_SHARE = 0.1  # long pauses, as a share of the time waited so far
_SLOWEST = 0.5  # maximum seconds between two calls
_RANKS_AT_ONCE = 200  # number of ranks whose first calls the store can serve within the first pause
_RANKS = 256  # number of ranks up to which the store can serve all calls without longer pauses
_SLOWEST_OF_MANY = 5.0  # maximum seconds between two calls for any number of ranks


class UnansweredError(Exception):
    """A call has timed out. It continues in a thread, and its result is ignored."""


class _CallThread(threading.Thread):
    """One call on a thread of its own. Times are those of the monotonic clock."""

    def __init__(self, function: Callable[[], Any], *, given_up_by: float = math.inf, returns_by: float = 0.0) -> None:
        super().__init__(name="dist_wandb-call", daemon=True)
        self.given_up_by = given_up_by
        self.returns_by = returns_by  # when it has returned for certain; 0 if unknown
        self._function = function
        self.result: Any = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Start the call; raise RuntimeError if the interpreter shuts down, when some versions start no threads."""
        if sys.is_finalizing():
            raise RuntimeError("the interpreter shuts down")
        super().start()

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.failure = error

    def ends_within(self, within: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Return whether the call ends within some seconds, or soon after `is_over` returns true."""
        has_to_end = False
        while True:
            if not has_to_end and is_over():
                has_to_end, within = True, min(within, LAST_CALL)
            self.join(min(_SLICE, within))
            if not self.is_alive():
                return True
            within -= _SLICE  # even if this process was suspended for longer
            if within <= 0:
                return False


def settle(within: float) -> None:
    """Wait at the end of the process for abandoned calls and for those that end in time, up to `within` seconds."""
    deadline = time.monotonic() + within
    for call in threading.enumerate():
        if isinstance(call, _CallThread):
            with suppress(RuntimeError):  # another thread is about to start it
                call.join(max(0.0, max(deadline, call.returns_by) - time.monotonic()))


class TimedCaller:
    """Makes calls on other threads, and abandons them after a timeout; refuses others until those have returned."""

    def __init__(self, limit: float, is_over: Callable[[], bool] = lambda: False, *, returns: bool = False) -> None:
        self._limit = limit  # seconds
        self._is_over = is_over  # polled during a call: whether to abandon it soon
        self._returns = returns  # whether calls always return in time: then the end of the process waits for them
        self._stuck: _CallThread | None = None

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function; raise UnansweredError if it has timed out, or an abandoned call has not returned yet."""
        if self._stuck is not None and self._stuck.is_alive():
            raise UnansweredError("it has stopped answering")
        began, outer = time.monotonic(), threading.current_thread()
        ends_by = began + self._limit
        if isinstance(outer, _CallThread) and outer.given_up_by <= ends_by:
            return function()  # the outer call is abandoned first, so this one does not need another thread
        call = _CallThread(function, given_up_by=ends_by, returns_by=ends_by if self._returns else 0.0)
        try:
            call.start()
        except RuntimeError:
            return function()
        if not call.ends_within(self._limit, self._is_over):
            self._stuck = call
            raise UnansweredError(f"it has not answered for {time.monotonic() - began:.1f} s")
        if call.failure is not None:
            raise call.failure
        return call.result  # type: ignore[no-any-return]  # what the function returns


def call_or_default(use_store: Callable[[], _T], otherwise: _T, within: float = STORE_PATIENCE) -> _T:
    """Call the job's store within some seconds; return `otherwise` if it does not answer, or is gone."""
    try:
        return TimedCaller(within).call(use_store)
    except (RendezvousError, UnansweredError):
        return otherwise
    except Exception:  # noqa: BLE001  # neither the training nor its end may fail because of it
        _log.exception("dist_wandb: the job's store could not be used")
        return otherwise


# --- polls ------------------------------------------------------------------------------------------------------------


def poll(
    query: Callable[[], _T | None],
    within: float,
    longest_pause: float,
    ranks: int = 1,
    sleep: Callable[[float], None] | None = None,
) -> _T | None:
    # Returns what `query` returns at last; `None` after `within` seconds. The pause between two calls doubles up to the
    # longest one, in seconds; then it grows with the time waited. It is longer if many `ranks` poll at the same time.
    began, pause = time.monotonic(), first_pause(longest_pause, ranks)
    while (found := query()) is None and (waited := time.monotonic() - began) < within:
        (sleep or time.sleep)(min(pause, within - waited))
        pause = next_pause(pause, waited, longest_pause, ranks)
    return found


def first_pause(longest_pause: float, ranks: int) -> float:
    return min(_FIRST_PAUSE * max(1.0, ranks / _RANKS_AT_ONCE), longest_pause)


def next_pause(pause: float, waited: float, longest_pause: float, ranks: int) -> float:
    return min(2 * pause, max(longest_pause, min(_SHARE * waited, interval(_SLOWEST, ranks))))


def interval(seconds: float, ranks: int) -> float:
    """Return the interval at which each of many ranks may poll the job's store; it is `seconds` for up to 256 ranks."""
    return max(seconds, min(seconds * ranks / _RANKS, _SLOWEST_OF_MANY))


class Interval:
    """Permits an action once every `seconds`; if each of many `ranks` polls the job's store then, see `interval`."""

    def __init__(self, seconds: float, ranks: int = 1) -> None:
        self._seconds = interval(seconds, ranks)
        self._last = -math.inf

    def is_over(self, now: float) -> bool:
        """Return whether the interval is over; if so, begin the next one."""
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


class BackgroundPoll(Generic[_T]):
    """A `poll` in the background: its current result can be read without waiting."""

    def __init__(self, query: Callable[[], _T | None], pause: float, ranks: Callable[[], int] = lambda: 1) -> None:
        self._query = query  # an error counts as `None`: no result yet
        self._first_pause = self._pause = pause  # between two calls, in seconds; it grows
        self._ranks = ranks  # how many poll at the same time
        self._began = time.monotonic()
        self._call: _CallThread | None = None
        self._has_waited = False  # whether `result` has waited for the current call
        self._next = 0.0
        self._result: _T | None = None

    def result(self, within: float = 0.0) -> _T | None:
        # `None` if there is none yet. Waits for the current call up to `within` seconds, but only once for each call.
        if self._result is None and self._call is None and time.monotonic() >= self._next:
            new = _CallThread(self._query)
            with suppress(RuntimeError):
                new.start()
                self._call = new
        call = self._call
        if call is not None and within and not self._has_waited:
            self._has_waited = not call.ends_within(within)
        if call is not None and not call.is_alive():
            now = time.monotonic()
            self._call, self._has_waited, self._next = None, False, now + self._pause
            self._pause = next_pause(self._pause, now - self._began, self._first_pause, self._ranks())
            self._result = call.result
        return self._result
