"""How a job ends: with which exit code, in which order its writers finish, and what happens if nobody says `finish`."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.store.timed_caller import STORE_PATIENCE, briefly

if TYPE_CHECKING:
    from types import FrameType

    from dist_wandb.settings.plan import Unit
    from dist_wandb.store.job_store import JobStore

FAILED = 1
_CTRL_C = 255  # as wandb records it
SIGTERM = 128 + signal.SIGTERM  # as shells report it
_PAUSE = 0.02  # seconds between two looks whether writers have ended
_AFTER_SIGTERM = 10.0  # seconds that runs get to end; launchers kill after 30


class Ending:
    """What the ranks of a unit tell each other about their ends.

    Ranks only ever set and look up keys of the job's store: nobody waits for a rank that is known to be gone, and where
    the store is gone, so is what could be told.

    Args:
        job_store: The session's keys in the job's store; `None` where there is no store.
        unit: The unit, seen from this rank.
    """

    def __init__(self, job_store: JobStore | None, unit: Unit) -> None:
        self._job_store = job_store if unit.size > 1 else None
        self._unit = unit

    def tell(self, exit_code: int | None) -> int | None:
        """Say how this rank ends, before it does. Of several failures the first counts: others follow from it.

        Returns:
            `exit_code`; if it is that of a failure, that of the first one.
        """
        job_store = self._job_store
        if not exit_code or job_store is None:
            return exit_code
        return int(briefly(lambda: job_store.claim(self._key("failed"), exit_code), exit_code))

    def tell_written(self) -> None:
        """Say that this rank writes nothing more into the unit's run."""
        job_store = self._job_store
        if job_store is not None:
            briefly(lambda: job_store.publish(self._written(self._unit.index), 1), None)

    def await_writers(self, deadline: float, writers: Collection[int]) -> bool:
        """Wait for other ranks of the unit to have said `tell_written`.

        Args:
            deadline: Until when, by the monotonic clock.
            writers: Their indices in the unit.

        Returns:
            Whether they have.
        """
        awaited = [self._written(index) for index in writers]
        job_store = self._job_store
        if job_store is None or not awaited:
            return True

        def wait() -> bool:
            with suppress(RendezvousError):
                while not job_store.has(awaited):
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(_PAUSE)
            return True

        return briefly(wait, False, max(0.0, deadline - time.monotonic()) + STORE_PATIENCE)

    def exit_code(self, gone: Collection[int]) -> int:
        """The exit code of the first rank that failed; 1 if some are gone without a word; else 0.

        Where ranks tell each other nothing of their ends, as each has a run of its own, no other rank counts.
        """
        job_store = self._job_store
        if job_store is None:
            return 0
        told = briefly(lambda: job_store.try_get(self._key("failed")), None)
        return int(told or (FAILED if gone else 0))

    def _key(self, what: str) -> str:
        return f"end/{self._unit.name}/{what}"

    def _written(self, index: int) -> str:
        return self._key(f"written/{index}")


class Once:
    """Something that one thread does, while others that are about to do it wait for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._done = threading.Event()

    def begins(self, within: float) -> bool:
        """Whether the caller is the one to do it. Others return once it is done, or after `within` seconds.

        The thread that does it is not made to wait for itself.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.get_ident()
                return True
        if self._thread != threading.get_ident():
            self._done.wait(within)
        return False

    def ends(self) -> None:
        """Say that it is done."""
        self._done.set()


def exit_code_of(error: BaseException | None) -> int | None:
    """The exit code that an exception means.

    Args:
        error: The exception that ends a block or a process, if any.

    Returns:
        `None` for no exception, and for the end of a generator that is not exhausted; the code of `sys.exit`; 255 for
        Ctrl-C, as wandb records it; else 1.
    """
    if error is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _CTRL_C if isinstance(error, KeyboardInterrupt) else FAILED


class ProcessEnd:
    """Calls a function when this process ends, before what was registered for its end until then.

    Args:
        function: Given the exit code of the process, as far as it can be told (that of an exception which nobody
            caught, or of `sys.exit` where `code_of_exit` tells it), and whether the process ends in the middle of its
            work: by an exception or a signal, rather than by `sys.exit`.
        code_of_exit: What `sys.exit` was called with; `None` if that is not known.
    """

    def __init__(self, function: Callable[[int, bool], None], code_of_exit: Callable[[], int | None]) -> None:
        self._function = function
        self._code_of_exit = code_of_exit
        self._failure_before: object = None
        self._pid: int | None = None
        self._is_ending = False
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

    def let_sigterm_be(self) -> None:
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

        In a thread, since the main thread may have been interrupted anywhere: what it holds must not be waited for.
        """
        if self._pid != os.getpid():  # a fork, such as a DataLoader's worker
            _die_of(number)
        elif self._is_ending:
            pass  # to be ended by several hands, as SLURM and torchrun's agent do, is no reason to hurry
        elif self._finishing:
            self._is_due = True
            limit = threading.Timer(_AFTER_SIGTERM, os._exit, (SIGTERM,))
            limit.daemon = True
            with suppress(RuntimeError):  # Python is going down, and some versions start no threads then
                limit.start()
        else:
            self._is_ending = True
            ending = threading.Thread(target=self._function, args=(SIGTERM, True), daemon=True)
            ending.start()
            ending.join(_AFTER_SIGTERM)
            _die_of(number)

    def _end(self) -> None:
        if self._pid != os.getpid():
            return
        in_flight = sys.exc_info()[1]  # in a child of multiprocessing, which ends within a `finally`
        failure = in_flight or _last_failure()
        if isinstance(failure, BaseException) and failure is not self._failure_before:
            self._function(exit_code_of(failure) or 0, not isinstance(failure, SystemExit))
        else:
            self._function(self._code_of_exit() or 0, False)


def _die_of(number: int) -> None:
    """End the process by a signal, as if nobody had handled it."""
    if not _is_main_thread():
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    """Whether this is the thread that alone may say how signals are handled."""
    return threading.current_thread() is threading.main_thread()


def _last_failure() -> object:
    """The exception that ended the main thread, or one that an interactive shell showed."""
    return getattr(sys, "last_value", None)
