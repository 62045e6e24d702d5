"""How sessions end: in which order, and with which exit code. Ranks are threads; nothing of wandb is started."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import THREE, FakeWandb, Job, Meeting
from limits import Limit
from units import eventually

from dist_wandb.exchange import interface
from dist_wandb.job.topology import Topology
from dist_wandb.session import registry
from dist_wandb.session.session import Session
from dist_wandb.wandb_files.debug_log import log_of


def codes_of(session: Session) -> list[int | None]:
    run: Any = session.run  # a fake one
    codes: list[int | None] = run.exit_codes
    return codes


@pytest.mark.parametrize("reduce", ["auto", None])
def test_the_primary_of_a_shared_run_ends_last(job: Job, fake_wandb: FakeWandb, reduce: Any) -> None:
    first, second, third = job(THREE, lambda _: {"id": "exp"}, run_mode="shared", reduce=reduce)
    ended: list[int] = []
    for session in (first, second, third):
        rank = session.topology.global_rank
        session.run.finish = lambda rank=rank, **_: ended.append(rank)  # type: ignore[method-assign]
    ending = threading.Thread(target=first.finish)
    ending.start()
    time.sleep(0.2)
    another = threading.Thread(target=first.finish)  # also waits for the end, which happens once
    another.start()
    second.finish()
    assert ended == [1]
    assert another.is_alive()
    third.finish()
    ending.join(20)
    another.join(20)
    assert ended == [1, 2, 0]
    assert len(fake_wandb.runs) == 3


@pytest.mark.parametrize("mode", ["auto", "shared"])
def test_a_failure_of_another_rank_fails_the_run(job: Job, mode: str) -> None:
    first, *others = job(THREE, lambda _: {"id": "exp"}, run_mode=mode)
    others[1].finish(7)
    others[0].finish()
    first.finish()
    assert codes_of(first) == [7]


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


def test_separate_runs_have_separate_exit_codes(job: Job, fake_wandb: FakeWandb) -> None:
    first, *others = job(THREE, run_mode="new")
    others[0].finish(7)
    others[1].finish()
    first.finish()
    assert sorted(str(run.exit_codes) for run in fake_wandb.runs) == ["[7]", "[None]", "[None]"]


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


def test_an_early_failure_is_the_exit_code_unless_it_is_revoked(job: Job, fake_wandb: FakeWandb) -> None:
    (alone,) = job([Topology.single()])
    alone.fail(1)
    alone.finish()
    (other,) = job([Topology.single()])
    other.fail(1)
    other.fail(None)
    other.finish()
    assert [run.exit_codes for run in fake_wandb.runs] == [[1], [None]]
