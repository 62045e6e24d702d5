"""Calls that have no time limit of their own, given one.

A host whose network is cut off closes no connection: a use of the job's store then waits for as long as TCP tries
again, about a quarter of an hour. So each use is a call on another thread, given up when its time is over, counted in
slices of 0.1 s: however long this process is held up, that is one slice. As long as a call that was given up has not
come back, the next ones on that connection are refused at once. So ranks that reach each other exchange numbers while
nobody reaches the store.

When the process ends, calls that were given up get 3 s more: one that comes back while Python goes down would abort it.

Limits: `join_timeout` at the start; `join_timeout` + `peer_timeout` for membership (a rank that comes back by then
takes part again); half a second once the rank finishes; `STORE_PATIENCE` for the config and at the end, but
`finish_timeout` to learn which writers a run waits for; a second for what is good to know, which then counts as "no".
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from dist_wandb.errors import RendezvousError
from dist_wandb.store.polling import next_pause

_T = TypeVar("_T")
_log = logging.getLogger("dist_wandb")
_SLICE = 0.1  # seconds between two looks whether waiting is to end
STORE_PATIENCE = 2.0  # seconds that the job's store gets to answer
_KEPT = 5.0  # seconds that a thread waits for another call
_LAST = 0.5  # seconds that a call gets when waiting is to end: last messages are sent then


class UnansweredError(Exception):
    """A call took too long; it goes on in a thread, and nobody waits for it."""


class TimedCaller:
    """Makes calls on other threads, and gives up those that take too long.

    As long as one that was given up has not come back, all others are refused at once: they would wait behind it.

    Args:
        limit: How long a call may take, in seconds.
        is_over: Asked while a call is waited for: whether it is to be given up soon.
        returns: Whether calls come back by themselves within the limit: then the end of the process waits for them.
    """

    def __init__(self, limit: float, is_over: Callable[[], bool] = lambda: False, *, returns: bool = False) -> None:
        self._limit = limit
        self._is_over = is_over
        self._returns = returns
        self._stuck: _Call | None = None

    def at_most(self, limit: float) -> TimedCaller:
        """One with another limit, which is to end when this one is."""
        return TimedCaller(limit, self._is_over)

    def call(self, function: Callable[[], _T]) -> _T:
        """What `function` returns or raises.

        Raises:
            UnansweredError: It takes too long, or one before it still does.
        """
        if self._stuck is not None and self._stuck.is_under_way:
            raise UnansweredError("it has stopped answering")
        began, waiting = time.monotonic(), getattr(_of_thread, "call", None)
        ends_by = began + self._limit
        if waiting is not None and waiting.given_up_by <= ends_by:
            return function()  # that call is given up before this one would be: it needs no thread of its own
        call = _Call(function, given_up_by=ends_by, returns_by=ends_by if self._returns else 0.0)
        try:
            call.start()
        except RuntimeError:  # Python is going down, and some versions start no threads then
            return function()
        if not ends_within(call, self._limit, self._is_over):
            self._stuck = call
            raise UnansweredError(f"it has not answered for {time.monotonic() - began:.1f} s")
        if call.failure is not None:
            raise call.failure
        return call.result  # type: ignore[no-any-return]  # what the function returns


class Inquiry(Generic[_T]):
    """A question that is asked in a thread, again and again until there is an answer. Whoever looks need not wait.

    Args:
        ask: Returns the answer; `None` if there is none yet. What it raises counts as none.
        pause: How long to wait before the question is asked again, in seconds; later more, as in `polling.poll`.
        ranks: How many ranks ask.
    """

    def __init__(self, ask: Callable[[], _T | None], pause: float, ranks: Callable[[], int] = lambda: 1) -> None:
        self._ask = ask
        self._first_pause = self._pause = pause
        self._ranks = ranks
        self._began = time.monotonic()
        self._call: _Call | None = None
        self._has_waited = False  # for the call that is under way: others are not to wait for it again
        self._next = 0.0
        self._answer: _T | None = None

    def look(self, within: float = 0.0) -> _T | None:
        """The answer, if there is one by now; asks again, if it is time to.

        Args:
            within: How long to wait for an answer that is on its way, in seconds. It is waited for once.
        """
        if self._answer is None and self._call is None and time.monotonic() >= self._next:
            self._begin()
        call = self._call
        if call is not None and within and not self._has_waited:
            self._has_waited = not ends_within(call, within)
        if call is not None and not call.is_under_way:
            now = time.monotonic()
            self._call, self._has_waited, self._next = None, False, now + self._pause
            self._pause = next_pause(self._pause, now - self._began, self._first_pause, self._ranks())
            self._answer = call.result
        return self._answer

    def forget(self) -> None:
        """Ask anew, after a pause: the answer has been used, or proved wrong."""
        self._began, self._pause = time.monotonic(), self._first_pause
        self._answer, self._next = None, self._began + self._pause

    def _begin(self) -> None:
        call = _Call(self._ask)
        with suppress(RuntimeError):  # Python is going down, and some versions start no threads then
            call.start()
            self._call = call


def ends_within(call: _Call, within: float, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Whether a call ends in time. However long this process is held up counts as one slice: it received nothing.

    Args:
        call: The call, which has been started.
        within: How long to wait for it, in seconds.
        is_over: Asked meanwhile: whether waiting is to end soon.
    """
    has_to_end = False
    while True:
        if not has_to_end and is_over():
            has_to_end, within = True, min(within, _LAST)
        if call.wait(min(_SLICE, within)):
            return True
        within -= _SLICE
        if within <= 0:
            return False


def briefly(use_store: Callable[[], _T], otherwise: _T, within: float = STORE_PATIENCE) -> _T:
    """Use the job's store, but do not wait for one that has stalled: its calls have no limit of their own.

    Args:
        use_store: Uses it.
        otherwise: What counts if it does not answer, or is gone.
        within: How long it is waited for, in seconds.
    """
    try:
        return TimedCaller(within).call(use_store)
    except (RendezvousError, UnansweredError):
        return otherwise
    except Exception:  # noqa: BLE001  # neither the training nor its end fails over it
        _log.exception("dist_wandb: the job's store could not be used")
        return otherwise


_under_way: set[_Call] = set()
_idle: list[_Caller] = []  # threads that wait for a call
_of_thread = threading.local()  # `call`: the one that this thread makes


def settle(within: float) -> None:
    """Give calls that were given up a last chance to come back, because this process ends.

    One that comes back while Python goes down aborts the process; one that has received nothing for long does not.

    Args:
        within: How long to wait for them together, in seconds; for those that return by themselves, until they do.
    """
    deadline = time.monotonic() + within
    for call in list(_under_way):
        call.wait(max(0.0, max(deadline, call.returns_by) - time.monotonic()))


class _Call:
    """One call, on a thread that nobody has to wait for.

    Args:
        function: What is called.
        given_up_by: Until when it is waited for, by the monotonic clock.
        returns_by: Until when it returns by itself, by the monotonic clock; 0 if that is not known.
    """

    def __init__(self, function: Callable[[], Any], *, given_up_by: float = math.inf, returns_by: float = 0.0) -> None:
        self.given_up_by = given_up_by
        self.returns_by = returns_by
        self._function = function
        self._caller: _Caller | None = None
        self._done = threading.Lock()
        self._done.acquire()
        self.result: Any = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Have a thread make the call: one that has made others, or a new one.

        Raises:
            RuntimeError: Python is going down.
        """
        if sys.is_finalizing():
            raise RuntimeError("no other thread runs any more")
        try:
            self._caller = _idle.pop()
        except IndexError:
            self._caller = _Caller()
            self._caller.start()
        _under_way.add(self)
        self._caller.calls.put(self)

    def make(self) -> None:
        """Make the call, on this thread."""
        try:
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            self.failure = error
        finally:
            _under_way.discard(self)

    def end(self) -> None:
        """Let those who wait for it go on."""
        self._done.release()

    @property
    def is_under_way(self) -> bool:
        """Whether it has not come back, and may."""
        return self._done.locked() and self._caller is not None and self._caller.is_alive()  # in a fork it is not

    def wait(self, within: float) -> bool:
        """Whether it has come back, waiting for it up to `within` seconds."""
        if not self.is_under_way:
            return True
        if not self._done.acquire(timeout=within):
            return False
        self._done.release()
        return True


class _Caller(threading.Thread):
    """A thread that makes one call after the other: starting one for each costs more than most calls.

    It ends when it has had none for a while, so nothing of ours is left in a process whose sessions have ended.
    """

    def __init__(self) -> None:
        super().__init__(name="dist_wandb-call", daemon=True)
        self.calls: SimpleQueue[_Call] = SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=_KEPT)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:  # it has just been given a call
                    call = self.calls.get()
                else:
                    return
            _of_thread.call = call
            call.make()
            _of_thread.call = None
            _idle.append(self)  # first: who waited may make the next call at once
            call.end()
            del call  # and what it has returned


def _forget_threads() -> None:
    """In a fork there are none."""
    _idle.clear()
    _under_way.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
