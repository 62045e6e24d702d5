"""Sessions of ranks of which only some contribute numbers. Ranks are threads."""

from __future__ import annotations

import pytest
from fakes import FakeWandb, Job, ranks

from dist_wandb.errors import ConfigurationError, DistWandbError
from dist_wandb.payloads.gathers import gathered_table
from dist_wandb.session.session import Session

FOUR = ranks(4)


def log_ranks(sessions: list[Session]) -> None:
    for rank, session in enumerate(sessions):
        session.log({"loss": 2.0**rank}, step=1)
    assert sum(session.flush() for session in sessions) == len(sessions)


def test_the_mean_is_that_of_the_unit_and_other_ranks_open_no_run(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0, 2], spread="loss")
    log_ranks(sessions)
    (run,) = fake_wandb.runs
    spread = {"loss/min": 1.0, "loss/max": 4.0, "loss/std": 1.5, "loss/argmax_rank": 2}
    assert run.rows == [{"loss": 2.5, **spread, "global_step": 1}]
    assert [bool(session.run) for session in sessions] == [True, False, False, False]
    assert {session.id for session in sessions} == {run.id}
    assert [session.reduces for session in sessions] == [True, False, True, False]


@pytest.mark.parametrize(("run_mode", "ids"), [("shared", {"exp"}), ("new", {"exp-rank-1", "exp-rank-3"})])
def test_only_ranks_of_the_unit_write(job: Job, fake_wandb: FakeWandb, run_mode: str, ids: set[str]) -> None:
    sessions = job(FOUR, lambda _: {"id": "exp"}, unit=[1, 3], primary_rank=-1, run_mode=run_mode)
    log_ranks(sessions)
    assert len(fake_wandb.runs) == 2
    assert {run.id for run in fake_wandb.runs} == ids
    assert [bool(session.run) for session in sessions] == [False, True, False, True]


def test_a_failed_rank_outside_of_the_unit_fails_the_run(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0, 2])
    sessions[1].finish(exit_code=7)
    for session in (sessions[3], sessions[2], sessions[0]):
        session.finish(exit_code=1)
    assert fake_wandb.runs[0].exit_codes == [7]


def test_rows_of_ranks_outside_of_the_unit_are_checked_but_not_written(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, unit=[0])
    with pytest.raises(DistWandbError):
        sessions[3].log({"loss": 1.0}, step=-1)
    sessions[3].log({"rows": gathered_table(["x"], [[1]])}, step=1)
    sessions[3].log({"loss": 9.0}, step=1)
    sessions[0].log({"loss": 1.0}, step=1)
    assert sum(session.flush() for session in sessions) == len(sessions)
    assert fake_wandb.runs[0].rows == [{"loss": 1.0, "global_step": 1}]


def test_a_primary_outside_of_its_unit_is_refused(job: Job) -> None:
    with pytest.raises(ConfigurationError, match=r"Rank 0 is the primary of the job, but it is not in unit=\[2, 3\]"):
        job(FOUR, unit=[2, 3])


def test_the_announcement_names_the_unit(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job(FOUR, unit=[0, 2])
    assert "4 ranks on 1 node: one run for ranks 0, 2:" in capsys.readouterr().err
