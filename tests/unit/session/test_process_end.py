"""The end of the process: exit codes, `atexit`, SIGTERM."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from ending import child
from fakes import FakeWandb
from limits import Limit

import dist_wandb
from dist_wandb.session import registry
from dist_wandb.session.registry import ProcessEnd, exit_code_of
from dist_wandb.session.stalls import watcher

pytestmark = pytest.mark.usefixtures("unhandled_sigterm")


class Codes(list[tuple[int, bool]]):
    """The exit codes with which runs have ended, and whether they have failed."""

    def note(self, code: int, failed: bool) -> None:
        self.append((code, failed))


def catching_sigterm(end_runs: Callable[[int, bool], None]) -> ProcessEnd:
    """Return the end of this process, which is asked to end when the process does, or gets SIGTERM."""
    end = ProcessEnd(end_runs)
    end.register()
    end.catch_sigterm()
    return end


class Kill:
    """Stands in for `os.kill`, and notes which runs had ended before."""

    def __init__(self, codes: Codes) -> None:
        self.seen: list[list[tuple[int, bool]]] = []
        self.done = threading.Event()
        self._codes = codes

    def __call__(self, pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        self.seen.append(self._codes.copy())
        self.done.set()


@contextmanager
def instead_of_a_kill(act: Callable[[int, int], object]) -> Iterator[list[int]]:
    """Call `act` instead of `os.kill`, and note exits; reset SIGTERM's handler afterwards."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            exits: list[int] = []
            for name, instead in (("kill", act), ("_exit", exits.append)):
                patch.setattr(os, name, instead)
            yield exits
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


_AT_EXIT: list[Callable[[], None]] = []
"""What the last test has registered with atexit."""


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Codes:
    _AT_EXIT.clear()
    monkeypatch.setattr(atexit, "register", _AT_EXIT.append)
    monkeypatch.delattr(sys, "last_value", raising=False)
    monkeypatch.setitem(vars(sys), "exit", sys.exit)  # which is replaced
    return Codes()


def test_an_uncaught_exception_determines_the_exit_code(codes: Codes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)  # an earlier one, of an interactive shell
    ProcessEnd(codes.note).register()
    with pytest.raises(SystemExit):
        sys.exit(3)
    _AT_EXIT[0]()
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    _AT_EXIT[0]()
    assert codes == [(3, False), (255, True)]


def test_what_a_cell_of_a_notebook_has_raised_does_not_end_the_run(
    codes: Codes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel goes on, also after it has interrupted a cell. With wandb, the run gets exit code 0, too."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    ProcessEnd(codes.note).register()
    monkeypatch.setitem(vars(sys), "last_value", KeyboardInterrupt())
    _AT_EXIT[0]()
    assert codes == [(0, False)]


@pytest.mark.usefixtures("codes")
def test_what_the_script_has_registered_between_two_runs_is_called_before_the_second_one_ends(
    fake_wandb: FakeWandb,
) -> None:
    dist_wandb.init().finish()
    atexit.register(lambda: dist_wandb.log({"bye": 1.0}))
    session = dist_wandb.init()
    for function in reversed(_AT_EXIT):
        function()
    session.finish()
    assert [run.rows for run in fake_wandb.runs] == [[], [{"bye": 1.0, "global_step": 0}]]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        *(("fork", error) for error in (RuntimeError(), SystemExit(1), SystemExit(3), SystemExit(0))),
        ("forkserver", SystemExit(3)),
        ("spawn", SystemExit(3)),
    ],
    ids=["fork, raises", "fork, 1", "fork, 3", "fork, 0", "forkserver", "spawn"],
)
def test_runs_of_children_of_multiprocessing_end_before_wandb(tmp_path: Path, method: str, error: Exception) -> None:
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=child, args=(error, tmp_path / "code"))
    process.start()
    process.join(60)
    failed = process.exitcode == 1  # also by `sys.exit`, as torch ends its children after an exception
    assert (tmp_path / "code").read_text() == f"{process.exitcode} {failed} False"
    assert process.exitcode == exit_code_of(error)


def test_a_fork_ends_no_runs(codes: Codes, monkeypatch: pytest.MonkeyPatch) -> None:
    ProcessEnd(codes.note).register()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    _AT_EXIT[0]()
    assert codes == []


@pytest.mark.parametrize("has_second", [False, True])
def test_sigterm_ends_runs_before_the_process_and_a_second_one_does_not_disturb_it(
    codes: Codes, has_second: bool
) -> None:
    kill, main = Kill(codes), threading.get_ident()

    def end_slowly(code: int, failed: bool) -> None:
        if has_second:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(0.3)
        codes.note(code, failed)

    catching_sigterm(end_slowly)
    with instead_of_a_kill(kill):
        signal.raise_signal(signal.SIGTERM)
        assert kill.done.wait(20)  # the main thread goes on before that if the end of the runs takes a second
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert kill.seen == [[(143, True)]]


def test_locks_of_the_interrupted_main_thread_do_not_block_the_end_of_a_run(codes: Codes) -> None:
    """For example a lock of wandb's, while it prints a traceback."""
    held, kill = threading.Lock(), Kill(codes)

    def end_run(code: int, failed: bool) -> None:
        with held:
            codes.note(code, failed)

    catching_sigterm(end_run)
    with instead_of_a_kill(kill):
        with held:
            signal.raise_signal(signal.SIGTERM)
            assert codes == []
        assert kill.done.wait(20)
    assert kill.seen == [[(143, True)]]


def test_a_slow_end_of_a_run_does_not_prevent_death_by_sigterm(codes: Codes, limit: Limit) -> None:
    """The main thread is interrupted again while the thread that ends the run is in `finishing`."""
    kill, goes_on = Kill(codes), threading.Event()

    def end_slowly(code: int, failed: bool) -> None:
        with end.finishing():
            assert goes_on.wait(20)
            codes.note(code, failed)

    limit(registry, _AT_A_TIME=0.1)
    end = catching_sigterm(end_slowly)
    with instead_of_a_kill(kill) as exits:
        signal.raise_signal(signal.SIGTERM)
        limit(registry, _AT_A_TIME=20.0)  # in which a busy machine lets the main thread handle the signal
        goes_on.set()
        assert kill.done.wait(20)
    assert kill.seen == [[(143, True)]]
    assert exits == []


def test_the_end_of_the_main_thread_after_sigterm_waits_for_the_run(codes: Codes, limit: Limit) -> None:
    kill, goes_on = Kill(codes), threading.Event()

    def end_slowly(code: int, failed: bool) -> None:
        assert goes_on.wait(20)
        time.sleep(0.3)
        codes.note(code, failed)

    limit(registry, _AT_A_TIME=0.1)
    catching_sigterm(end_slowly)
    with instead_of_a_kill(kill):
        with mock.patch.object(threading.Timer, "start"):  # the main thread is not interrupted again
            signal.raise_signal(signal.SIGTERM)
        goes_on.set()
        _AT_EXIT[0]()
    assert kill.seen == [[(143, True)]]


@pytest.mark.usefixtures("codes")  # else SIGTERM is due at the end of this process
def test_sigterm_while_a_session_is_closed_waits_for_the_end_of_its_run(fake_wandb: FakeWandb) -> None:
    killed: list[list[int | None]] = []
    act = lambda *_: killed.append(list(fake_wandb.runs[0].exit_codes))  # noqa: E731
    signalled = mock.patch.object(watcher, "stop", side_effect=lambda: signal.raise_signal(signal.SIGTERM))
    own = mock.patch.object(registry, "process_end", ProcessEnd(lambda *_: None))
    with own, signalled, mock.patch.object(os, "_exit"), instead_of_a_kill(act):
        dist_wandb.init().finish()  # forgets the session, and ends its run after that
    assert killed == [[None]]


@pytest.mark.parametrize("when", ["before the end of the runs", "during it"])
def test_sigterm_where_no_thread_can_be_started_ends_the_process_after_the_runs(
    codes: Codes, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Python 3.12 and later start none during shutdown."""
    kill = Kill(codes)

    def end_runs(code: int, failed: bool) -> None:
        if when == "during it":
            signal.raise_signal(signal.SIGTERM)
        codes.note(code, failed)

    catching_sigterm(end_runs)
    with pytest.raises(SystemExit):
        sys.exit(3)
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't create new thread")))
    with instead_of_a_kill(kill):
        if when != "during it":
            signal.raise_signal(signal.SIGTERM)
        assert kill.seen == []
        _AT_EXIT[0]()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert kill.seen == [codes] == [[(3, False) if when == "during it" else (143, True)]]


@pytest.mark.usefixtures("fake_wandb")
def test_sigterm_is_caught_while_a_session_is_open_unless_the_user_does() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    first, second = dist_wandb.init(), dist_wandb.init(reinit="create_new")
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    first.finish()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.finish()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with dist_wandb.init():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
