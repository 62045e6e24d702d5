"""The end of the process: exit codes, `atexit`, SIGTERM."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
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


class Ending:
    """The end of this process: a stand-in notes how its runs have ended, and what had when the process was killed."""

    def __init__(self) -> None:
        self.codes: list[tuple[int, bool]] = []  # exit codes of runs, and whether they have failed
        self.seen: list[list[tuple[int, bool]]] = []
        self.exits: list[int] = []
        self.is_killed = threading.Event()
        self.at_exit: list[Callable[[], None]] = []  # what was registered with atexit
        self.process = ProcessEnd(self.note)

    def note(self, code: int, failed: bool) -> None:
        self.codes.append((code, failed))

    def kill(self, pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), signal.SIGTERM)
        self.seen.append(self.codes.copy())
        self.is_killed.set()

    def catch_sigterm(self, end_runs: Callable[[int, bool], None]) -> None:
        """Let `end_runs` be called when the process ends, or gets SIGTERM."""
        self.process = ProcessEnd(end_runs)
        self.process.register()
        self.process.catch_sigterm()


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    ending = Ending()
    for owner, name, instead in (
        (atexit, "register", ending.at_exit.append),
        (os, "kill", ending.kill),
        (os, "_exit", ending.exits.append),
        (sys, "exit", sys.exit),  # which is replaced
    ):
        monkeypatch.setitem(vars(owner), name, instead)
    monkeypatch.delattr(sys, "last_value", raising=False)
    return ending


def test_an_uncaught_exception_determines_the_exit_code(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)  # an earlier one, of an interactive shell
    ending.process.register()
    with pytest.raises(SystemExit):
        sys.exit(3)
    ending.at_exit[0]()
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    ending.at_exit[0]()
    # A kernel goes on after a cell has raised, or was interrupted. With wandb, its run does not fail either.
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    ending.at_exit[0]()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # a fork ends no runs
    ending.at_exit[0]()
    assert ending.codes == [(3, False), (255, True), (3, False)]


def test_what_the_script_has_registered_between_two_runs_is_called_before_the_second_one_ends(
    ending: Ending, fake_wandb: FakeWandb
) -> None:
    dist_wandb.init().finish()
    atexit.register(lambda: dist_wandb.log({"bye": 1.0}))
    session = dist_wandb.init()
    for function in reversed(ending.at_exit):
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


@pytest.mark.parametrize("has_second", [False, True])
def test_sigterm_ends_runs_before_the_process_and_a_second_one_does_not_disturb_it(
    ending: Ending, has_second: bool
) -> None:
    main = threading.get_ident()

    def end_slowly(code: int, failed: bool) -> None:
        if has_second:
            signal.pthread_kill(main, signal.SIGTERM)
            time.sleep(0.3)
        ending.note(code, failed)

    ending.catch_sigterm(end_slowly)
    signal.raise_signal(signal.SIGTERM)
    assert ending.is_killed.wait(20)  # the main thread goes on before that if the end of the runs takes a second
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert ending.seen == [[(143, True)]]


def test_locks_of_the_interrupted_main_thread_do_not_block_the_end_of_a_run(ending: Ending) -> None:
    """For example a lock of wandb's, while it prints a traceback."""
    held = threading.Lock()

    def end_run(code: int, failed: bool) -> None:
        with held:
            ending.note(code, failed)

    ending.catch_sigterm(end_run)
    with held:
        signal.raise_signal(signal.SIGTERM)
        assert ending.codes == []
    assert ending.is_killed.wait(20)
    assert ending.seen == [[(143, True)]]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_slow_end_of_a_run_is_waited_for_and_does_not_prevent_death_by_sigterm(
    ending: Ending, limit: Limit, is_interrupted: bool
) -> None:
    """The main thread is interrupted again while the thread that ends the run is in `finishing`, or ends before."""
    goes_on = threading.Event()

    def end_slowly(code: int, failed: bool) -> None:
        with ending.process.finishing():
            assert goes_on.wait(20)
            time.sleep(0.3 * (not is_interrupted))
            ending.note(code, failed)

    limit(registry, _AT_A_TIME=0.1)
    ending.catch_sigterm(end_slowly)
    with nullcontext() if is_interrupted else mock.patch.object(threading.Timer, "start"):
        signal.raise_signal(signal.SIGTERM)
    limit(registry, _AT_A_TIME=20.0)  # in which a busy machine lets the main thread handle the signal
    goes_on.set()
    if not is_interrupted:
        ending.at_exit[0]()
    assert ending.is_killed.wait(20)
    assert ending.seen == [[(143, True)]]
    assert ending.exits == []


@pytest.mark.usefixtures("ending")  # else SIGTERM is due at the end of this process
def test_sigterm_while_a_session_is_closed_waits_for_the_end_of_its_run(fake_wandb: FakeWandb) -> None:
    signalled = mock.patch.object(watcher, "stop", side_effect=lambda: signal.raise_signal(signal.SIGTERM))
    codes: list[int | None] = []
    killed = mock.patch.object(os, "kill", side_effect=lambda *_: codes.extend(fake_wandb.runs[0].exit_codes))
    with mock.patch.object(registry, "process_end", ProcessEnd(lambda *_: None)), signalled, killed:
        dist_wandb.init().finish()  # forgets the session, and ends its run after that
    assert codes == [None]


@pytest.mark.parametrize("when", ["before the end of the runs", "during it"])
def test_sigterm_where_no_thread_can_be_started_ends_the_process_after_the_runs(
    ending: Ending, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Python 3.12 and later start none during shutdown."""

    def end_runs(code: int, failed: bool) -> None:
        if when == "during it":
            signal.raise_signal(signal.SIGTERM)
        ending.note(code, failed)

    ending.catch_sigterm(end_runs)
    with pytest.raises(SystemExit):
        sys.exit(3)
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't create new thread")))
    if when != "during it":
        signal.raise_signal(signal.SIGTERM)
    assert ending.seen == []
    ending.at_exit[0]()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert ending.seen == [ending.codes] == [[(3, False) if when == "during it" else (143, True)]]


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
