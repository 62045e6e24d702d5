"""How sessions end: in which order, and with which exit code. Ranks are threads; nothing of wandb is started."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from dist_wandb.session.exit_codes import exit_code_of
from dist_wandb.session.process_end import ProcessEnd
from dist_wandb.session.unit_end import UnitEnd
from dist_wandb.settings.plan import Unit, unit_of
from dist_wandb.store import timed_caller
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeWandb, Job

    from dist_wandb.session.session import Session

THREE = [Topology(rank, rank, 0, 3, 3, 1) for rank in range(3)]


def unit(index: int) -> Unit:
    return unit_of(THREE[index], "global")


@pytest.fixture
def endings() -> list[UnitEnd]:
    store = dist.HashStore()
    return [UnitEnd(JobStore(store, "test", THREE[index], 1.0), unit(index)) for index in range(3)]


# --- what ranks tell each other ---------------------------------------------------------------------------------------


def test_the_first_failure_counts(endings: list[UnitEnd]) -> None:
    assert endings[2].tell(3) == 3
    assert endings[1].tell(1) == 3
    assert [ending.exit_code(gone=()) for ending in endings] == [3, 3, 3]


@pytest.mark.parametrize("code", [None, 0])
def test_without_a_failure_nothing_is_told(endings: list[UnitEnd], code: int | None) -> None:
    assert endings[1].tell(code) == code
    assert endings[0].exit_code(gone=()) == 0


def test_a_rank_that_is_gone_without_a_word_has_failed(endings: list[UnitEnd]) -> None:
    assert endings[0].exit_code(gone={2}) == 1


def test_the_primary_awaits_other_writers(endings: list[UnitEnd]) -> None:
    endings[1].tell_written()
    assert not endings[0].await_writers(time.monotonic() + 0.05, {1, 2})
    assert endings[0].await_writers(time.monotonic() + 0.05, {1})
    threading.Timer(0.05, endings[2].tell_written).start()
    assert endings[0].await_writers(time.monotonic() + 60, {1, 2})


def test_where_there_is_no_store_nobody_is_awaited() -> None:
    alone = UnitEnd(None, unit(0))
    alone.tell_written()
    assert alone.tell(3) == 3
    assert alone.exit_code(gone=()) == 0
    assert alone.exit_code(gone={1}) == 0  # with a run of its own, whatever becomes of others
    assert alone.await_writers(time.monotonic(), {1})


def test_where_the_store_is_gone_nobody_is_awaited(monkeypatch: pytest.MonkeyPatch, endings: list[UnitEnd]) -> None:
    def gone(*_: Any) -> Any:
        raise RuntimeError("connection reset")

    for name in ("set", "check", "get", "compare_set"):
        monkeypatch.setattr(dist.PrefixStore, name, gone)
    endings[0].tell_written()
    assert endings[0].tell(3) == 3
    assert endings[0].exit_code(gone=()) == 0
    assert endings[0].await_writers(time.monotonic() + 20, {1, 2})


def codes_of(session: Session) -> list[int | None]:
    run: Any = session.run  # a fake one
    codes: list[int | None] = run.exit_codes
    return codes


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", ["auto", None])
def test_of_a_shared_run_the_primary_ends_last(job: Job, fake_wandb: FakeWandb, reduce: Any) -> None:
    first, second, third = job(THREE, lambda _: {"id": "exp"}, run_mode="shared", reduce=reduce)
    ended: list[int] = []
    for session in (first, second, third):
        rank = session.topology.global_rank
        session.run.finish = lambda rank=rank, **_: ended.append(rank)  # type: ignore[method-assign]
    ending = threading.Thread(target=first.finish)
    ending.start()
    time.sleep(0.2)
    second.finish()
    assert ended == [1]
    third.finish()
    ending.join(20)
    assert ended == [1, 2, 0]
    assert len(fake_wandb.runs) == 3


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_a_failure_of_another_rank_is_the_runs(job: Job, mode: str) -> None:
    first, *others = job(THREE, lambda _: {"id": "exp"}, run_mode=mode)
    others[1].finish(7)
    others[0].finish()
    first.finish()
    assert codes_of(first) == [7]


def test_runs_of_their_own_have_codes_of_their_own(job: Job, fake_wandb: FakeWandb) -> None:
    first, *others = job(THREE, run_mode="new")
    others[0].finish(7)
    others[1].finish()
    first.finish()
    assert sorted(str(run.exit_codes) for run in fake_wandb.runs) == ["[7]", "[None]", "[None]"]


def test_a_writer_that_does_not_end_is_waited_for_and_told(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = job(
        THREE, lambda _: {"id": "exp"}, run_mode="shared", reduce=None, limits={"finish_timeout": 0.3}
    )
    second.finish()
    begun = time.monotonic()
    first.finish()
    assert 0.25 < time.monotonic() - begun < 20
    assert "rank 0 did not wait longer for the other ranks to end their part of the run exp" in caplog.text
    assert codes_of(first) == [None]


def test_a_rank_that_fails_waits_for_nobody(job: Job) -> None:
    first, *_ = job(THREE, lambda _: {"id": "exp"}, run_mode="shared", limits={"finish_timeout": 60.0})
    begun = time.monotonic()
    first.finish(1)
    assert time.monotonic() - begun < 20
    assert codes_of(first) == [1]


def test_a_process_that_exits_with_a_code_waits_as_one_that_ends_well(job: Job) -> None:
    first, second, third = job(THREE, lambda _: {"id": "exp"}, run_mode="shared")
    for session in (first, second, third):
        session.log({"loss": float(session.topology.global_rank)}, step=0)
    others = [
        threading.Thread(target=session.end_with_process, args=(3,), kwargs={"failed": False})
        for session in (second, third)
    ]
    for thread in others:
        thread.start()
    first.end_with_process(3, failed=False)
    for thread in others:
        thread.join()
    run: Any = first.run
    assert run.rows == [{"loss": 1.0, "rank-0/loss": 0.0, "global_step": 0}]
    assert codes_of(first) == [3]


def test_a_failure_that_was_told_before_the_end_is_the_runs_unless_it_was_overcome(
    job: Job, fake_wandb: FakeWandb
) -> None:
    (alone,) = job([Topology.single()])
    alone.fail(1)
    alone.finish()
    (other,) = job([Topology.single()])
    other.fail(1)
    other.fail(None)
    other.finish()
    assert [run.exit_codes for run in fake_wandb.runs] == [[1], [None]]


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, None),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("no data"), 1),
        (KeyboardInterrupt(), 255),
        (RuntimeError(), 1),
    ],
)
def test_what_an_exception_means(error: BaseException | None, code: int | None) -> None:
    assert exit_code_of(error) == code


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    monkeypatch.setattr(atexit, "register", lambda _: None)
    monkeypatch.delattr(sys, "last_value", raising=False)
    return []


def test_an_exception_that_nobody_caught_is_the_code_of_the_process(
    codes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: 3)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)  # an earlier one, of an interactive shell
    end.register()
    end._end()
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt())
    end._end()
    assert codes == [(3, False), (255, True)]


def test_a_child_of_multiprocessing_ends_while_its_exception_is_under_way(codes: list[tuple[int, bool]]) -> None:
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: None)
    end.register()
    try:
        try:
            sys.exit(4)
        finally:
            end._end()
    except SystemExit:
        end._end()
    end._end()
    assert codes == [(4, False), (4, False), (0, False)]


def test_a_fork_ends_nothing(codes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: None)
    end.register()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    end._end()
    assert codes == []


def test_sigterm_ends_runs_first_and_then_the_process(
    codes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: None)
    end.register()
    end.catch_sigterm()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert codes == [(143, True)]
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_a_second_sigterm_does_not_disturb_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    ended: list[int] = []

    def end_slowly(code: int, _failed: bool) -> None:
        ended.append(code)
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(0.3)
        ended.append(code)

    end = ProcessEnd(end_slowly, lambda: None)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    end.register()
    end.catch_sigterm()
    main = threading.get_ident()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda _, number: killed.append(len(ended) * 100 + number))
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert killed == [200 + signal.SIGTERM]


def test_sigterm_lets_the_end_of_a_run_go_on(codes: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    done: list[str] = []
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: None)
    end.register()
    end.catch_sigterm()
    monkeypatch.setattr(os, "_exit", lambda _: None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda _, number: killed.append(f"{number} after {done}"))
            with end.finishing():
                signal.raise_signal(signal.SIGTERM)
                done.append("uploaded")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert killed == [f"{int(signal.SIGTERM)} after ['uploaded']"]
    assert codes == []


def test_a_store_that_has_stalled_is_not_waited_for() -> None:
    stalled = threading.Event()
    begun = time.monotonic()
    assert timed_caller.briefly(stalled.wait, otherwise=True, within=0.1) is True
    assert time.monotonic() - begun < 20
    stalled.set()


def test_where_no_thread_can_be_started_the_store_is_asked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert timed_caller.briefly(lambda: 3, 0) == 3


def test_who_handles_sigterm_is_left_alone(codes: list[tuple[int, bool]]) -> None:
    end = ProcessEnd(lambda code, failed: codes.append((code, failed)), lambda: None)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        end.catch_sigterm()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        end.let_sigterm_be()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end.catch_sigterm()
    assert signal.getsignal(signal.SIGTERM) == end._on_sigterm
    end.let_sigterm_be()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.usefixtures("fake_wandb")
def test_sigterm_is_caught_as_long_as_a_session_is_open(job: Job) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    import dist_wandb

    first, second = dist_wandb.init(), dist_wandb.init()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    first.finish()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    second.finish()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert job is not None
