"""The end of a process in which nobody has finished the sessions: `atexit`, children of multiprocessing, SIGTERM.

`atexit` is registered anew with every session, so that it comes before the end of wandb's own process; children of
multiprocessing leave without it, and have `Finalize`. The exit code is that of the exception nobody caught, or what
wandb's replacement of `sys.exit` has noticed. SIGTERM, where nobody else handles it, ends the runs in a thread, because
the main thread may hold any lock, and then the process by the same signal.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dist_wandb.session.exit_codes import SIGTERM, exit_code_of

if TYPE_CHECKING:
    from types import FrameType

_AFTER_SIGTERM = 10.0  # seconds that runs get to end; launchers kill after 30
_AT_A_TIME = 1.0  # seconds of it that the main thread waits before it is let go on
_MOMENT = 0.05  # seconds for which it is


class ProcessEnd:
    """Calls a function when this process ends, before what was registered for its end until then.

    Args:
        function: Given the exit code of the process, as far as it is known (that of an exception which nobody
            caught, or of `sys.exit` where `code_of_exit` returns it), and whether the process ends in the middle of its
            work: by an exception or a signal, rather than by `sys.exit`.
        code_of_exit: What `sys.exit` was called with; `None` if that is not known.
    """

    def __init__(self, function: Callable[[int, bool], None], code_of_exit: Callable[[], int | None]) -> None:
        self._function = function
        self._code_of_exit = code_of_exit
        self._failure_before: object = None
        self._pid: int | None = None
        self._ending: threading.Thread | None = None  # after SIGTERM
        self._ends_by = 0.0
        self._is_waiting = threading.Event()  # whether the main thread is, for `_ending`
        self._finishing = 0
        self._is_due = False

    def register(self) -> None:
        """Be the first to be called, from now on. wandb registers an end of its own when its first run is opened."""
        if self._pid != os.getpid():  # in a fork nothing is registered
            self._failure_before = _last_failure()
            self._finishing, self._is_due = 0, False
        if multiprocessing.parent_process() is None:
            atexit.unregister(self._end)
            atexit.register(self._end)
        elif self._pid != os.getpid():  # children of multiprocessing leave without atexit
            from multiprocessing.util import Finalize

            Finalize(None, self._end, exitpriority=100)
        self._pid = os.getpid()

    def catch_sigterm(self) -> None:
        """Let SIGTERM end runs before it ends the process, unless somebody else handles it."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def restore_sigterm(self) -> None:
        """Undo `catch_sigterm`: when the last run has ended, and in a fork, which has none to end.

        Python calls handlers between its own steps only: a fork that waits for a lock, as workers of a `Pool` do, may
        miss it for ever, and `Pool.terminate` waits for it.
        """
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While a run is being ended by the main thread, SIGTERM waits for that, though not for long."""
        self._finishing += 1
        try:
            yield
        finally:
            self._finishing -= 1
            if self._is_due and not self._finishing:
                _die_of(signal.SIGTERM)

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        """End the runs, then die of the signal as the process would have.

        In a thread, because the main thread may have been interrupted anywhere, and may hold what the end needs: a lock
        of wandb's, while it prints a traceback. So it goes on for a moment now and then, until the runs have ended.
        """
        if self._pid != os.getpid():  # a fork, such as a DataLoader's worker
            _die_of(number)
        elif self._finishing and self._ending is None:
            self._is_due = True
            _call_in(_AFTER_SIGTERM, os._exit, SIGTERM)
        elif self._ending is None:
            self._ending = threading.Thread(target=self._function, args=(SIGTERM, True), daemon=True)
            self._ends_by = time.monotonic() + _AFTER_SIGTERM
            self._is_waiting.set()
            self._ending.start()
            self._await_ending(self._ending)
        elif not self._is_waiting.is_set():
            self._await_ending(self._ending)
        # Else to be ended by several hands, as SLURM and torchrun's agent do, is no reason to hurry.

    def _await_ending(self, ending: threading.Thread) -> None:
        self._is_waiting.set()
        left = self._ends_by - time.monotonic()
        ending.join(max(0.0, min(left, _AT_A_TIME)))
        if left < _AT_A_TIME or not ending.is_alive():
            _die_of(signal.SIGTERM)
            return
        self._is_waiting.clear()
        _call_in(_MOMENT, self._interrupt_again, ending)

    def _interrupt_again(self, ending: threading.Thread) -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)
        ending.join(max(0.0, self._ends_by - time.monotonic()))
        if not self._is_waiting.wait(_AT_A_TIME):  # it is in native code, which no handler interrupts
            os._exit(SIGTERM)

    def _end(self) -> None:
        if self._pid != os.getpid():
            return
        if self._ending is not None:  # the main thread has come to its end while it was let go on
            self._ending.join(max(0.0, self._ends_by - time.monotonic()))
            _die_of(signal.SIGTERM)
            return
        in_flight = sys.exc_info()[1]  # in a child of multiprocessing, which ends within a `finally`
        failure = in_flight or _last_failure()
        if isinstance(failure, BaseException) and failure is not self._failure_before:
            self._function(exit_code_of(failure) or 0, not isinstance(failure, SystemExit))
        else:
            self._function(self._code_of_exit() or 0, False)


def _call_in(seconds: float, function: Callable[..., object], argument: object) -> None:
    """Call a function on a thread of its own, unless the process has ended by then."""
    timer = threading.Timer(seconds, function, (argument,))
    timer.daemon = True
    with suppress(RuntimeError):  # Python is going down, and some versions start no threads then
        timer.start()


def _die_of(number: int) -> None:
    """End the process by a signal, as if nobody had handled it."""
    if not _is_main_thread():
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    """Whether this is the only thread that may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


def _last_failure() -> object:
    """The exception that ended the main thread, or one that an interactive shell showed."""
    return getattr(sys, "last_value", None)
