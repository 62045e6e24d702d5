"""The sessions of this process that have not ended, and what happens to them when it forks or ends.

`atexit` is registered anew when wandb's own process was started, so that it runs before the end of that, but after what
the script registers later, as with wandb. Before Python 3.13, children of multiprocessing exit without it, and later it
does not know their exit code: they end their runs when Python waits for their threads. The exit code is that of the
exception, or of `sys.exit`, which is replaced. If no other handler is installed, SIGTERM ends the runs in a thread,
because the main thread may hold any lock, and then ends the process by the same signal.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dist_wandb.exchange.interface import end_all
from dist_wandb.runs import wandb_private
from dist_wandb.session.stalls import watcher
from dist_wandb.settings.options import Current

if TYPE_CHECKING:
    from dist_wandb.session.session import Session
    from dist_wandb.session.shutdown import Shutdown

FAILED = 1  # exit codes, as shells report them
SIGTERM = 128 + signal.SIGTERM
_CTRL_C = 255  # as wandb records it

_AFTER_SIGTERM = 10.0  # seconds that runs get to end; launchers kill after 30
_AT_A_TIME = 1.0  # seconds of these that the main thread waits before it continues for a moment
_MOMENT = 0.05  # seconds for which it continues
outer_session: Current[Session | None] = Current("outer_session", None)
"""The session of the enclosing decorated function."""
is_nested_on_purpose: Current[bool] = Current("is_nested_on_purpose", default=False)
"""Whether `init` is called for a decorated function, which ends the session that it opens."""

opened_in: set[int] = set()  # this process, and those of which it is a fork, once a session was opened there
shutdowns: dict[Session, Shutdown] = {}  # how to end the sessions that have not ended, the oldest first


class ProcessEnd:
    """Calls a function when this process ends, before everything that was registered for its end until then.

    The function gets the exit code of the process, as far as it is known, and whether the process ends in the middle of
    its work: by an exception or a signal, rather than by `sys.exit`.
    """

    def __init__(self, function: Callable[[int, bool], None]) -> None:
        self._function = function
        self._code_of_exit: int | None = None  # the argument of `sys.exit`
        self._failure_before: object = None  # shown earlier by an interactive shell: it does not end the process
        self._registered: tuple[int, object] = 0, None  # by which process, and the connection to wandb's at that time
        self._ending: threading.Thread | None = None  # after SIGTERM
        self._ends_by = 0.0  # on the monotonic clock
        self._is_waiting = threading.Event()  # set while the main thread waits for `_ending`
        self._finishing = 0  # number of runs that are being ended
        self._is_due = False  # whether SIGTERM is to end the process after that

    def register(self) -> None:
        """Register to be called at exit before wandb's own handler, which is registered when its process starts."""
        is_first = self._is_fork  # where nothing is registered yet
        before, self._registered = self._registered, (os.getpid(), wandb_private.service_in_use())
        if is_first:
            self._failure_before = getattr(sys, "last_value", None)
            self._finishing, self._is_due = 0, False
        if not before[0]:  # forks have what their parent has replaced
            sys.exit = partial(self._note_and_exit, sys.exit)
        if multiprocessing.parent_process() is None:
            if before != self._registered:
                atexit.unregister(self._end)
                atexit.register(self._end)
        elif is_first:
            with suppress(AttributeError, RuntimeError):  # it is not there, or the process is ending already
                threading._register_atexit(self._end)  # type: ignore[attr-defined]  # noqa: SLF001

    def _note_and_exit(self, exit_before: Callable[..., NoReturn], code: Any = None, /) -> NoReturn:
        if _is_main_thread():
            self._code_of_exit = exit_code_of(SystemExit(code))
        exit_before(code)

    def catch_sigterm(self) -> None:
        """Let SIGTERM end runs before it ends the process, unless another handler is installed."""
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def restore_sigterm(self) -> None:
        """Undo `catch_sigterm`: after the end of the last run, and in a fork, which has no run to end.

        Python calls handlers only between its own steps. A fork that waits for a lock, as workers of a `Pool` do, may
        never call them, and `Pool.terminate` waits for it.
        """
        if _is_main_thread() and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """While a run is being ended, delay SIGTERM until that is done, for a limited time."""
        self._finishing += 1
        try:
            yield
        finally:
            self._finishing -= 1
            if self._is_due and not self._finishing:
                _die_of(signal.SIGTERM)

    @property
    def _is_fork(self) -> bool:
        """Whether this process has not registered, but perhaps its parent."""
        return self._registered[0] != os.getpid()

    @property
    def has_begun(self) -> bool:
        """Whether SIGTERM ends the runs, while what the main thread was doing continues now and then."""
        return self._ending is not None and not self._is_fork

    def _on_sigterm(self, number: int, _frame: FrameType | None) -> None:
        """End the runs, then end the process by the signal, as it would have without a handler.

        This happens in a thread, because the main thread may have been interrupted anywhere, and may hold a lock that
        the end needs, such as one of wandb's while it prints a traceback. Therefore the main thread continues for a
        moment now and then, until the runs have ended.
        """
        if self._is_fork:  # such as a DataLoader's worker
            _die_of(number)
        elif self._finishing and self._ending is None:
            self._is_due = True
            _call_in(_AFTER_SIGTERM, os._exit, SIGTERM)
        elif self._ending is None:
            self._ending = threading.Thread(target=self._function, args=(SIGTERM, True), daemon=True)
            self._ends_by = time.monotonic() + _AFTER_SIGTERM
            self._is_waiting.set()
            try:
                self._ending.start()
            except RuntimeError:  # Python 3.12 and later start none during shutdown: `_end` comes, or has begun
                self._ending, self._is_due = None, True
                return
            self._await_ending(self._ending)
        elif not self._is_waiting.is_set():
            self._await_ending(self._ending)
        # Otherwise it was signalled several times, as by SLURM and torchrun's agent, which is no reason to hurry.

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
        if not self._is_waiting.wait(_AT_A_TIME):  # the main thread is in native code, which no handler interrupts
            os._exit(SIGTERM)

    def _end(self) -> None:
        if self._is_fork:
            return
        if self._ending is not None:  # the main thread has ended while it was allowed to continue
            self._ending.join(max(0.0, self._ends_by - time.monotonic()))
            _die_of(signal.SIGTERM)
            return
        # what has ended the main thread, or Python's shell has shown; IPython goes on after it, and so does its run
        failure = None if is_in_ipython() else getattr(sys, "last_value", None)
        if self._is_due:
            self._function(SIGTERM, True)
        elif isinstance(failure, BaseException) and failure is not self._failure_before:
            self._function(exit_code_of(failure) or 0, True)
        else:
            code = _code_of_child()  # 1 in one of torch.multiprocessing, which exits after an exception
            self._function(code or self._code_of_exit or 0, code == FAILED)
        self.restore_sigterm()
        if self._is_due:
            _die_of(signal.SIGTERM)


def _code_of_child() -> int | None:
    """Return the exit code of a child of multiprocessing in which this is called at its end; `None` elsewhere."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "multiprocessing.process":
        frame = frame.f_back
    return frame.f_locals.get("exitcode") if frame is not None else None


def is_in_ipython() -> bool:
    """Return whether this is IPython or a notebook, whose cells are run again and again."""
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)() is not None


def exit_code_of(error: BaseException | None) -> int | None:
    """Return the exit code for what ends a block or a process; `None` for no exception, and for a closed generator."""
    if error is None or isinstance(error, GeneratorExit):
        return None
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _CTRL_C if isinstance(error, KeyboardInterrupt) else FAILED


def _call_in(seconds: float, function: Callable[..., object], argument: object) -> None:
    timer = threading.Timer(seconds, function, (argument,))
    timer.daemon = True
    with suppress(RuntimeError):  # some versions of Python start no threads during shutdown
        timer.start()


def _die_of(number: int) -> None:
    """End the process by a signal, as if there were no handler."""
    if not _is_main_thread():
        os._exit(128 + number)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set_names_anew() -> None:
    """Let the names of the current run stand for it again, whatever the script has assigned to them, as wandb does."""
    package = sys.modules["dist_wandb"]
    for name in package._OF_CURRENT:  # noqa: SLF001  # of this package
        vars(package).pop(name, None)


def add(session: Session, shutdown: Shutdown) -> None:
    shutdowns[session] = shutdown
    _set_names_anew()
    opened_in.add(os.getpid())
    process_end.register()


def remove(session: Session) -> None:
    if shutdowns.pop(session, None) is not None:  # another thread may do the same
        _set_names_anew()
    if not shutdowns:
        watcher.stop()


def release_sigterm() -> None:
    if not shutdowns:
        process_end.restore_sigterm()


def open_sessions() -> list[Session]:
    """Return the sessions that have not ended, the oldest first. Close those whose run the user has finished."""
    for session, shutdown in shutdowns.copy().items():
        if wandb_private.is_finished(session.run):
            shutdown.close_without_run()
    return [*shutdowns]


def in_scope() -> list[Session]:
    """Return the sessions of this function, the oldest first: in a decorated one, that of its call and those inside."""
    found, inside = open_sessions(), outer_session()
    mine = [session for session in found if inside in (session, session.opened_inside)]
    return mine if inside is not None else mine or found


def repr_with(session_of: Callable[[Any], Session | None]) -> Callable[[object], str]:
    return lambda self: f"<dist_wandb.{type(self).__name__} {session_of(self) or 'without an open session'}>"


def current() -> Session | None:
    """Return the session that is ``wandb.run``: the latest one that was not opened with ``reinit="create_new"``."""
    return next((session for session in reversed(in_scope()) if session.is_current), None)


def holds(run: object) -> bool:
    return any(session.run is run for session in [*shutdowns])


def _end_with_process(exit_code: int, failed: bool) -> None:
    """Finish the sessions that are still open, the newest first, and then the exchanges' threads."""
    for shutdown in reversed([*shutdowns.values()]):
        shutdown.end_with_process(exit_code, failed=failed)
    end_all(failed=failed)
    watcher.end()
    vars(sys.modules["dist_wandb"])["run"] = None  # for a `__del__` at a time when nothing can be imported any more


def _prepare_fork() -> None:
    for shutdown in [*shutdowns.values()]:
        shutdown.relay.prepare_fork()


def _after_fork() -> None:
    wandb_private.disarm_exit_hooks()
    process_end.restore_sigterm()


process_end: ProcessEnd = ProcessEnd(_end_with_process)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_child=_after_fork)
