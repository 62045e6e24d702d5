"""How sessions end: with which exit code, in which order, and by whom. Ranks are threads; wandb is not started."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
import time
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import wandb
from fakes import THREE, TWO, FakeWandb, Job, Meeting, on_ranks, open_rank
from limits import Limit
from units import eventually

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange import interface
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.session import registry
from dist_wandb.session.api import get_run
from dist_wandb.session.job_link import UnitEnd
from dist_wandb.session.opener import open_session
from dist_wandb.session.relay import Relay
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options
from dist_wandb.settings.reduction import DEGRADED
from dist_wandb.wandb_files.debug_log import log_of


def test_a_closed_stderr_affects_no_run(fake_wandb: FakeWandb) -> None:
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stderr(closed), dist_wandb.init() as session:
        session.log({"loss": 0.5})
    assert fake_wandb.runs[0].exit_codes == [None]


def test_a_session_that_cannot_be_ended_does_not_keep_others_from_it(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = job(TWO, lambda _: {"mode": "offline"}, run_mode="shared")
    for run in fake_wandb.runs:
        run.dir = None  # type: ignore[assignment]
    on_ranks(2, lambda rank: registry.shutdowns[sessions[rank]].end_with_process(0, failed=False))
    assert caplog.text.count("dist_wandb: the run of rank 0 could not be ended") == 1
    assert [run.exit_codes for run in fake_wandb.runs] == [[0], [0]]


@pytest.mark.newest  # the setting
def test_a_timeout_is_an_error_of_finish_if_the_settings_ask_for_it(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    session, run = dist_wandb.init(), fake_wandb.runs[0]
    late = mock.Mock(side_effect=TimeoutError("Timed out finishing run."))
    run.finish, run.settings = late, wandb.Settings(finish_timeout=1, finish_timeout_raises=True)  # type: ignore[method-assign, attr-defined]
    with pytest.raises(TimeoutError, match="Timed out finishing run"):
        session.finish()
    assert "could not be ended: TimeoutError" in caplog.text
    assert not get_run()
    session.finish()


def test_a_row_that_cannot_be_processed_costs_no_other(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    sessions, post = job(TWO), Rows.post

    def fail(own: Rows, contribution: Contribution, *others: Any) -> Any:
        if "bad" in contribution.metrics:
            raise ArithmeticError
        return post(own, contribution, *others)

    def log(rank: int) -> None:
        sessions[rank].log({"bad": 1.0}, step=0)
        sessions[rank].log({"loss": float(rank)}, step=1)
        sessions[rank].finish()

    with mock.patch.object(Rows, "post", fail):
        on_ranks(2, log)
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 1}]
    assert all(f"a row of rank {rank} could not be processed and is lost: ['bad']" in caplog.text for rank in (0, 1))


CODES: dict[BaseException, int] = {
    RuntimeError("x"): 1,
    SystemExit(3): 3,
    SystemExit(0): 0,
    SystemExit("x"): 1,
    SystemExit(None): 0,
    KeyboardInterrupt(): 255,
}


@pytest.mark.parametrize("error", CODES, ids=repr)
def test_an_exception_in_the_with_statement_is_in_the_log_and_sets_the_exit_code(
    fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    with pytest.raises(type(error)), dist_wandb.init():
        raise error
    assert capsys.readouterr().err.count("RuntimeError: x") == isinstance(error, RuntimeError)
    assert fake_wandb.runs[0].exit_codes == [CODES[error]]
    assert not get_run()


@pytest.mark.parametrize("error", [RuntimeError("x"), SystemExit(0), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("ends", ["finish", "the process"])
@pytest.mark.parametrize("during", ["the exchange", "the handover", "the report"])
def test_what_a_signal_handler_raises_at_the_end_does_not_leave_the_run_open(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, error: BaseException, ends: str, during: str
) -> None:
    sessions = job(TWO)
    for session in sessions:
        session.log({"loss": 0.5}, step=1)
    close = CollectiveExchange.close

    def wait(*arguments: Any, **named: Any) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        return close(*arguments, **named) if during == "the exchange" else time.sleep(20)  # rank 1 does not end

    of = {
        "the exchange": (CollectiveExchange, "close"),
        "the handover": (Relay, "close"),
        "the report": (UnitEnd, "report"),
    }
    with contextlib.ExitStack() as patched:

        def interrupt(*_: object) -> None:
            patched.close()
            raise error

        patched.enter_context(mock.patch.object(*of[during], wait))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            with pytest.raises(type(error)) if ends == "finish" else contextlib.nullcontext():
                if ends == "finish":
                    sessions[0].finish()
                else:
                    registry.shutdowns[sessions[0]].end_with_process(0, failed=False)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    whole = {"loss": 0.5, "global_step": 1}
    assert fake_wandb.runs[0].rows in ([whole], [{**whole, DEGRADED: 1}])  # on a busy machine, of this rank alone
    assert [code or 0 for code in fake_wandb.runs[0].exit_codes] == [registry.exit_code_of(error)]
    assert "could not be ended" not in caplog.text
    is_named = f"the end of the run of rank 0 was interrupted: {error!r}" in caplog.text
    assert is_named == (ends == "the process")


def test_a_released_session_leaves_its_run_open(fake_wandb: FakeWandb) -> None:
    session = dist_wandb.init()
    session.release()
    session.finish()
    assert fake_wandb.runs[0].exit_codes == []
    assert not get_run()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_without_a_store_finishes_at_once_with_its_own_rows(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    session = open_rank(rank, wandb_init={"id": "exp"})
    session.log({"loss": 0.5}, step=1)
    begin = time.monotonic()
    session.finish()
    assert time.monotonic() - begin < 20
    assert f"Rank {rank} found no store of the job until it finished" in caplog.text
    rows = [{"loss": 0.5, DEGRADED: 1, "global_step": 1}]
    assert [run.rows for run in fake_wandb.runs] == [rows] * (rank == 0)


@pytest.mark.parametrize("how", ["run.finish", "wandb.finish", "block"])
def test_pending_rows_are_written_before_the_user_finishes_the_run(fake_wandb: FakeWandb, job: Job, how: str) -> None:
    sessions = job(TWO)
    run = sessions[0].run
    wandb.run = run  # type: ignore[assignment]

    def log_and_finish(rank: int) -> None:
        sessions[rank].log({"loss": float(rank)}, step=1)
        if how == "wandb.finish" and rank == 0:
            wandb.finish(exit_code=0)
        elif how == "block":
            with sessions[rank].run:
                pass
        else:
            sessions[rank].run.finish(0)

    on_ranks(2, log_and_finish)
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [0]
    assert not dist_wandb.get_run()  # on the rank without a run as well
    assert "finish" not in vars(run)


@pytest.mark.parametrize("how", ["run.finish", "dist_wandb.finish of a logger's run"])
def test_ranks_without_a_run_notice_that_the_user_finished_it(
    fake_wandb: FakeWandb, job: Job, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    first, second = job(TWO)
    registry.remove(second)  # it is in another process
    first.log({"loss": 1.0}, step=1)
    second.log({"loss": 2.0}, step=1)
    is_finished = attrgetter("_is_finished")  # which scripts read of W&B's run
    assert not is_finished(second)
    begin = time.monotonic()
    (first.run if how == "run.finish" else dist_wandb).finish()
    assert time.monotonic() - begin < 20  # much less than the 30 s of finish_timeout
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [None]
    for _ in range(3):
        second.log({"loss": 3.0}, step=2)  # the training survives it
    assert caplog.text.count("was finished on the rank that has it") == 1
    second.finish()
    assert is_finished(second)
    assert is_finished(second.run)
    assert caplog.text.count("rank 1 has lost values: 3 that were logged after the run was finished.") == 1
    assert not get_run()


def test_finishing_a_run_ends_all_sessions_that_log_to_it(
    fake_wandb: FakeWandb,
    store: dist.Store,  # noqa: ARG001  # they meet there
) -> None:
    """A logger without an id uses the open run: otherwise ``wandb.run`` stays set on a rank without a run."""

    def opened(number: int, run_id: str, run: Any = None) -> list[Any]:
        def open_one(rank: int) -> Any:
            adopt = lambda _: run if rank == 0 else None  # noqa: E731
            options = Options(limits=Limits(join_timeout=30.0, finish_timeout=30.0, heartbeat=0.05))
            return open_session(
                options,
                {} if run else {"id": run_id},
                integration="test",
                topology=TWO[rank],
                number=number,
                proposed_id=run_id,
                adopt=adopt,
            )

        return on_ranks(2, open_one)

    first, beside = opened(1, "exp"), opened(2, "other")
    second = opened(3, "exp", first[0].run)
    assert [session.id for session in second] == ["exp", "exp"]
    for rank in range(2):
        second[rank].log({"loss": 1.0 + rank}, step=1)
        first[rank].log({"late": 2.0 + rank}, step=2)
    second[1].run.finish()
    assert not {first[1], second[1]} & set(registry.open_sessions())
    second[0].run.finish()
    assert set(registry.open_sessions()) == set(beside)
    rows = sorted(fake_wandb.runs[0].rows, key=str)
    assert rows == [{"late": 2.5, "global_step": 2}, {"loss": 1.5, "global_step": 1}]
    assert len(fake_wandb.runs[0].exit_codes) == 1
    on_ranks(2, lambda rank: beside[rank].finish())


def test_concurrent_finishes_end_the_run_once_with_all_rows(fake_wandb: FakeWandb, job: Job) -> None:
    first, second = job(TWO)
    first.log({"loss": 1.0}, step=1)
    ends = [threading.Thread(target=end) for end in (first.run.finish, first.finish, first.run.finish)]
    for end in ends:
        end.start()
        time.sleep(0.05)
    second.log({"loss": 2.0}, step=1)
    second.finish()
    for end in ends:
        end.join(30)
        assert not end.is_alive()
    assert fake_wandb.runs[0].rows == [{"loss": 1.5, "global_step": 1}]
    assert fake_wandb.runs[0].exit_codes == [None]


def test_a_runs_own_finish_method_is_restored(fake_wandb: FakeWandb) -> None:
    run: Any = wandb.init()
    ended: list[int | None] = []

    def own(exit_code: int | None = None) -> None:  # as in disabled runs of older versions
        ended.append(exit_code)

    run.finish = own
    session = open_session(Options(), {}, integration="test", adopt=lambda _: run)
    session.finish()
    assert run.finish is own
    open_session(Options(), {}, integration="test", adopt=lambda _: run)
    run.finish(3)
    assert ended == [3]
    assert fake_wandb.runs[0].exit_codes == []


def test_an_existing_run_is_not_finished(fake_wandb: FakeWandb) -> None:
    theirs = fake_wandb.init(project="digits")
    wandb.run = theirs  # type: ignore[assignment]
    fake_wandb.init = lambda **_: theirs  # type: ignore[method-assign]  # wandb returns the open run
    with open_session(Options(), {}, integration="test"):
        pass
    assert theirs.exit_codes == []


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("exit_code", "finish_timeout"), [(None, 0.2), (1, None)])
def test_finish_returns_within_its_limit_and_after_a_failure_at_once(
    fake_wandb: FakeWandb, exit_code: int | None, finish_timeout: float | None
) -> None:
    session = open_rank(0, limits={"join_timeout": 60.0, "finish_timeout": finish_timeout})
    session.log({"loss": 0.5}, step=3)
    start = time.monotonic()
    assert session.flush(0.1) is False
    session.finish(exit_code)
    assert time.monotonic() - start < 20
    assert fake_wandb.runs[0].rows == [{"loss": 0.5, "global_step": 3}], "the other rank never opened a session"
    assert fake_wandb.runs[0].exit_codes == [exit_code]


def test_log_after_finish_is_an_error(job: Job) -> None:
    sessions = job(TWO)
    on_ranks(2, lambda rank: sessions[rank].finish())
    for rank, session in enumerate(sessions):
        text = f"log was called on rank {rank} after the session was finished"
        with pytest.raises(wandb.Error, match=text) as raised:
            session.log({"loss": 0.5})
        assert isinstance(raised.value, ConfigurationError)
        assert session.flush()


def test_a_signal_handler_may_finish_while_a_row_is_logged(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO)
    put = CollectiveExchange.put

    def interrupted(exchange: CollectiveExchange, contribution: Contribution) -> None:
        on_ranks(1, lambda _: sessions[1].finish())
        sessions[0].finish()
        put(exchange, contribution)

    with (
        mock.patch.object(CollectiveExchange, "put", interrupted),
        pytest.raises(ConfigurationError, match="after the session was finished"),
    ):
        sessions[0].log({"loss": 1.0})
    assert fake_wandb.runs[0].rows == []


def test_finishing_the_run_keeps_the_limit_of_the_session(fake_wandb: FakeWandb, job: Job) -> None:
    """This waits first for the last rows and then for the others' ends, both within one `finish_timeout`."""
    first, _ = job(TWO, limits={"finish_timeout": 6.0})
    late = mock.Mock(side_effect=lambda *_, **__: time.sleep(0.3))
    with mock.patch.multiple(CollectiveExchange, flush=late, close=mock.DEFAULT) as patched:
        first.run.finish()
    assert fake_wandb.runs[0].exit_codes == [None]
    assert patched["close"].call_args.args[0] <= 6.0 - 0.3


@pytest.mark.usefixtures("store")
def test_of_two_open_runs_a_rank_without_a_run_ends_one(fake_wandb: FakeWandb) -> None:
    """Their ids are W&B's, so the rank does not know them by itself."""
    (_, first), (primary, second) = [[open_rank(rank, number=number) for rank in range(2)] for number in (1, 2)]
    first.finish()
    second.log({"loss": 2.0})
    primary.log({"loss": 1.0})
    second.finish()
    primary.finish()
    assert fake_wandb.runs[1].rows == [{"loss": 1.5, "global_step": 0}]


# --- the order of several writers -------------------------------------------------------------------------------------


def codes_of(session: Session) -> list[int | None]:
    run: Any = session.run  # a fake one
    codes: list[int | None] = run.exit_codes
    return codes


@pytest.mark.parametrize(("mode", "codes"), [("auto", [7]), ("shared", [7, None, 7]), ("new", [None, None, 7])])
def test_a_failure_of_another_rank_fails_the_run_unless_it_has_its_own(job: Job, mode: str, codes: list[Any]) -> None:
    sessions = job(THREE, lambda _: {"id": "exp"}, run_mode=mode)
    for rank, code in ((2, 7), (1, None), (0, None)):
        sessions[rank].finish(code)
    assert [codes_of(session) for session in sessions if session.run] == [[code] for code in codes]


def test_a_failure_before_another_rank_writes_the_run_fails_it(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = job(THREE[1:], lambda _: {"id": "exp"}, limits={"join_timeout": 1.0})
    for session in (first, second):
        session.log({"loss": 1.0}, step=0)
    second.finish(7)
    first.finish()
    assert [run.exit_codes for run in fake_wandb.runs] == [[7]]


def test_a_rank_that_fails_before_it_is_certain_that_it_writes_the_run_does(
    job: Job, fake_wandb: FakeWandb, limit: Limit
) -> None:
    limit(interface, _LONGEST_GRACE=20.0)
    second, _ = job(THREE[1:], reduce=None, limits={"heartbeat": 20.0})  # for so long a failed rank waits at most
    second.log({"loss": 1.0}, step=0)
    second.finish(3)
    (run,) = fake_wandb.runs
    assert ([row["loss"] for row in run.rows], run.exit_codes) == ([1.0], [3])


def test_rows_that_could_not_wait_for_the_rank_that_writes_fail_the_run(
    job: Job, fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    are_logged, init = threading.Event(), fake_wandb.init

    def open_later(**arguments: Any) -> Any:
        assert are_logged.wait(20)
        return init(**arguments)

    fake_wandb.init = open_later  # type: ignore[method-assign]
    (second,) = job(THREE[1:2], reduce=None, limits={"join_timeout": 1.0, "max_pending_rows": 2})
    for step in range(5):
        second.log({"loss": 1.0}, step=step)
    are_logged.set()
    eventually(lambda: second.run)
    assert not second.flush()
    second.finish()
    (run,) = fake_wandb.runs
    assert ([row["global_step"] for row in run.rows], run.exit_codes) == ([0, 1], [1])
    assert "3 rows of rank 1 are lost: see max_pending_rows. The run ends as failed." in caplog.text


def test_rows_that_a_writer_cannot_write_to_disk_fail_the_run(job: Job) -> None:
    first, second = job(THREE[:2], lambda _: {"id": "exp", "mode": "offline"}, run_mode="shared")
    log = log_of(Path(second.run.dir).parent)
    log.parent.mkdir()
    log.write_text('{"level":"ERROR","msg":"writer: failed to save record: no space left on device"}')
    second.finish()
    first.finish()
    assert codes_of(first) == [1]


def test_a_writer_that_does_not_end_is_waited_for_and_reported(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    first, second, _ = job(
        THREE, lambda _: {"id": "exp"}, run_mode="shared", reduce=None, limits={"finish_timeout": 0.3}
    )
    second.finish()
    begun = time.monotonic()
    first.finish()
    assert 0.25 < time.monotonic() - begun < 20
    assert "rank 0 stopped waiting for the other writers of the run exp to end" in caplog.text
    assert codes_of(first) == [None]


def test_a_process_that_exits_with_a_code_waits_like_a_successful_one(job: Job) -> None:
    first, second, third = job(THREE, lambda _: {"id": "exp"}, run_mode="shared")
    for session in (first, second, third):
        session.log({"loss": float(session.topology.global_rank)}, step=0)
    others = [
        threading.Thread(target=registry.shutdowns[session].end_with_process, args=(3,), kwargs={"failed": False})
        for session in (second, third)
    ]
    for thread in others:
        thread.start()
    registry.shutdowns[first].end_with_process(3, failed=False)
    for thread in others:
        thread.join()
    run: Any = first.run
    assert run.rows == [{"loss": 1.0, "rank-0/loss": 0.0, "global_step": 0}]
    assert codes_of(first) == [3]


@pytest.mark.parametrize("exit_code", [None, 3])
def test_a_run_ends_with_its_own_exit_code_if_the_store_is_gone(
    job: Job, meeting: Meeting, exit_code: int | None
) -> None:
    outage = meeting.outage()
    first, *_ = job(THREE, lambda _: {"id": "exp"}, run_mode="shared", reduce=None)
    ending = threading.Thread(target=first.finish, args=(exit_code,))
    ending.start()
    time.sleep(0.2)  # in which it waits for the other writers, unless it has failed
    outage.begin()
    ending.join(20)
    assert not ending.is_alive()
    assert codes_of(first) == [exit_code]
