"""Restarts by torchrun and SLURM: which run is continued, and from which record."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import wandb
from restarts import AGENT, RECORDS, SLURM, Start, attempt, given, ids, kill, record_files

from dist_wandb.job import job_store
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.launch import Launch
from dist_wandb.job.model import Topology
from dist_wandb.runs import requested
from dist_wandb.session.opener import open_session
from dist_wandb.settings.options import Limits, Options

if TYPE_CHECKING:
    from tests.conftest import FakeWandb


# --- restarts by torchrun ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("directory", ["here", "elsewhere"])
def test_a_torchrun_restart_continues_through_the_agents_store(
    start: Start, fake_wandb: FakeWandb, run_mode: str, directory: str
) -> None:
    agent, options = dist.HashStore(), {"run_mode": run_mode}
    first = start(agent=agent, options=options, dir="here")
    before = ids(first)
    writers = 1 if run_mode == "auto" else 2
    assert given(fake_wandb, "resume", last=writers) == [None] * writers
    kill(first)
    second = start(agent=agent, options=options, environ=attempt(1), dir=directory)
    assert ids(second) == before
    assert given(fake_wandb, "resume", last=writers) == ["allow"] * writers


def test_a_restart_continues_from_the_record_without_a_lasting_store(start: Start, fake_wandb: FakeWandb) -> None:
    first = start(environ=attempt(0))
    kill(first)
    second = start(environ=attempt(1))
    assert ids(second) == ids(first)
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize("environ", [attempt(1, "/agent/none_z"), {"TORCHELASTIC_RESTART_COUNT": "1"}])
def test_another_torchrun_start_is_not_a_restart(start: Start, environ: dict[str, str]) -> None:
    """Its first attempt may have died before it wrote its own record."""
    first = start(environ=attempt(0))
    kill(first)
    assert ids(start(environ=environ)) != ids(first)


def test_several_restarts_continue_the_same_run(start: Start) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    kill(first)
    second = start(agent=agent, environ=attempt(1))
    kill(second)
    assert ids(start(agent=agent, environ=attempt(2))) == ids(first)


@pytest.mark.parametrize("by_store", [True, False])
def test_a_finished_run_is_not_continued(start: Start, by_store: bool) -> None:
    agent = dist.HashStore() if by_store else None
    first = start(agent=agent, environ=attempt(0))
    for session in first:
        session.finish()
    assert not RECORDS.exists()
    assert ids(start(agent=agent, environ=attempt(1))) != ids(first)


def test_a_finished_job_does_not_continue_runs_of_another(start: Start) -> None:
    agent = dist.HashStore()
    for session in start(agent=agent):
        session.finish()
    other = start()
    kill(other)
    assert not set(ids(start(agent=agent, environ=attempt(1), resume="auto"))) & set(ids(other))


def test_a_failed_run_is_continued_even_if_nobody_reads_about_it(start: Start) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    for session in first:
        session.finish(exit_code=1)
    with Path("/dev/null").open() as unwritable, redirect_stderr(unwritable):
        assert ids(start(agent=agent, environ=attempt(1))) == ids(first)


@pytest.mark.parametrize("way", ["argument", "settings", "environment"])
def test_resume_never_starts_new_runs(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    kill(first)
    arguments: dict[str, Any] = {}
    if way == "argument":
        arguments["resume"] = "never"
    elif way == "settings":
        arguments["settings"] = wandb.Settings(resume="never")
    else:
        monkeypatch.setenv("WANDB_RESUME", "never")
    second = start(agent=agent, environ=attempt(1), **arguments)
    assert ids(second) != ids(first)
    assert "allow" not in given(fake_wandb, "resume")


def test_resume_must_is_passed_to_wandb(start: Start, fake_wandb: FakeWandb) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    kill(first)
    assert ids(start(agent=agent, environ=attempt(1), resume="must")) == ids(first)
    assert given(fake_wandb, "resume") == ["must", "must"]


@pytest.mark.parametrize(("wanted", "resume"), [("exp", "allow"), ("other", None)])
def test_the_users_id_is_used_and_resumed_if_it_is_the_earlier_one(
    start: Start, fake_wandb: FakeWandb, wanted: str, resume: str | None
) -> None:
    agent = dist.HashStore()
    kill(start(agent=agent, id="exp"))
    assert ids(start(agent=agent, environ=attempt(1), id=wanted)) == [f"{wanted}-rank-0", f"{wanted}-rank-1"]
    assert given(fake_wandb, "resume") == [resume, resume]


def test_a_rewound_run_is_not_resumed(start: Start, fake_wandb: FakeWandb) -> None:
    agent = dist.HashStore()
    kill(start(agent=agent, options={"run_mode": "auto"}, resume_from="abc?_step=3"))
    start(agent=agent, options={"run_mode": "auto"}, environ=attempt(1), resume_from="abc?_step=3")
    assert given(fake_wandb, "resume", last=1) == [None]


def test_sessions_of_a_job_are_continued_separately(start: Start) -> None:
    agent = dist.HashStore()
    first, second = start(agent=agent), start(agent=agent, number=2)
    kill(first + second)
    assert ids(start(agent=agent, environ=attempt(1), number=2)) == ids(second)
    assert ids(start(agent=agent, environ=attempt(1))) == ids(first)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_continues_the_runs_that_remain(
    start: Start, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    """With fewer ranks, the other runs stay unchanged; with more ranks, new ones are opened in the same group."""
    agent = dist.HashStore()
    first = start(agent=agent, environ=attempt(0))
    base_id = first[0].plan.base_id
    kill(first)
    start(agent=agent, environ=attempt(1), world=world)
    expected = [base_id] if world == 1 else [f"{base_id}-rank-{rank}" for rank in range(world)]
    assert sorted(given(fake_wandb, "id", last=world)) == expected
    assert given(fake_wandb, "resume", last=world) == ["allow"] * world
    assert set(given(fake_wandb, "group", last=world)) == ({None} if world == 1 else {base_id})
    output = capsys.readouterr().err
    assert f"continues the run {base_id} of an earlier start (restart 1 of torchrun)." in output
    assert f"It had 2 ranks, and has {world} now." in output


def test_an_unreachable_agent_does_not_prevent_a_start(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**AGENT, **attempt(1)}.items():
        monkeypatch.setenv(name, value)
    open_session(Options(limits=Limits(join_timeout=0.2)), {}, integration="test", topology=Topology.single()).finish()
    assert fake_wandb.arguments == [{}]


# --- restarts by SLURM ------------------------------------------------------------------------------------------------


def requeue(number: int, **other: str) -> dict[str, str]:
    return {**SLURM, "SLURM_RESTART_COUNT": str(number), **other}


def test_a_requeued_job_continues_from_its_record(start: Start, fake_wandb: FakeWandb) -> None:
    first = start(environ=SLURM)
    kill(first)
    assert ids(start(environ=requeue(1))) == ids(first)
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize("other", [{"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}])
def test_another_job_or_step_is_not_continued(start: Start, other: dict[str, str]) -> None:
    first = start(environ=SLURM)
    kill(first)
    assert ids(start(environ=requeue(1, **other))) != ids(first)


def test_another_command_of_the_job_is_not_continued(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start(environ=SLURM)
    kill(first)
    monkeypatch.setattr(sys, "argv", ["other.py"])
    assert ids(start(environ=requeue(1))) != ids(first)


def test_repeating_a_command_in_a_job_is_not_a_restart(start: Start) -> None:
    kill(start(environ=SLURM))
    again = start(environ=requeue(1))
    kill(again)
    by_the_same_script = start(environ=requeue(1))
    assert ids(by_the_same_script) != ids(again)
    kill(by_the_same_script)
    assert ids(start(environ=requeue(2))) == ids(by_the_same_script)


def test_jobs_that_share_a_directory_find_their_own_records(start: Start) -> None:
    """As the tasks of an array do; each deletes only its own record."""
    other, first = start(environ={**SLURM, "SLURM_JOB_ID": "8"}), start(environ=SLURM)
    for session in other:
        session.finish()
    assert record_files() == ["job", "latest"]  # both belong to the first one
    kill(first)
    again = start(environ=requeue(1))
    assert ids(again) == ids(first)
    kill(again)
    assert ids(start(environ={"SLURM_JOB_ID": "9"}, resume="auto")) == ids(first)
    assert record_files() == ["job", "latest"]  # of the third job, which continues the first one's runs


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_the_job_name_gives_the_same_id_at_every_start_without_a_store(
    start: Start, fake_wandb: FakeWandb, run_mode: str
) -> None:
    options = {"run_mode": run_mode}
    writers = 1 if run_mode == "auto" else 2
    first = start(store=False, environ=SLURM, options=options)
    kill(first)
    assert given(fake_wandb, "resume", last=writers) == [None] * writers
    second = start(store=False, environ=requeue(1), options=options)
    assert ids(second) == ids(first)
    assert given(fake_wandb, "resume", last=writers) == ["allow"] * writers
    kill(second)
    assert not set(ids(start(store=False, environ=requeue(2), options=options, resume="never"))) & set(
        filter(None, ids(first))
    )


def test_records_are_not_used_without_a_store(start: Start) -> None:
    kill(start(environ=SLURM))
    second = start(store=False, environ=requeue(1))
    assert [str(name).partition("-")[0] for name in ids(second)] == [second[0].plan.base_id] * 2


# --- the launchers' variables -----------------------------------------------------------------------------------------


def test_a_launch_identifies_restarts_of_torchrun_and_slurm() -> None:
    first, again = Launch.detect(attempt(0)), Launch.detect(attempt(1))
    assert first.torchrun_start is not None
    assert first.torchrun_start == again.torchrun_start
    assert Launch.detect(attempt(0, "/other/agent")).torchrun_start != first.torchrun_start
    assert Launch.detect({"TORCHELASTIC_ERROR_FILE": "x"}).torchrun_start is None
    assert (Launch.detect(requeue(2)).slurm_step, Launch.detect(requeue(2)).requeues) == ("slurm-7-0", 2)
    assert Launch.detect({"SLURM_JOB_ID": "7"}).slurm_step == "slurm-7-batch"
    assert Launch.detect({}).slurm_step is None


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted"),
    [
        ({}, {}, None),
        ({"resume": False}, {"WANDB_RESUME": "auto"}, None),
        ({"resume": True}, {}, "auto"),
        ({"resume": "must"}, {"WANDB_RESUME": "auto"}, "must"),
        ({"settings": {"resume": "allow"}}, {"WANDB_RESUME": "auto"}, "allow"),
        ({"settings": wandb.Settings(resume="never")}, {}, "never"),
        ({}, {"WANDB_RESUME": "auto"}, "auto"),
    ],
)
@pytest.mark.usefixtures("bare_environment")
def test_resume_is_read_from_arguments_settings_and_environment(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], environ: dict[str, str], wanted: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert requested.resume(arguments) == wanted


def test_lasting_keys_are_shared_by_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(job_store, "_store_of_agent", lambda *_: store)
    lasting = JobStore.find("a", Topology.single(), 1.0, lasting=True)
    assert lasting is not None
    lasting.publish("k", 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    of_attempt, again = (JobStore.find("a", Topology.single(), 1.0, lasting=lasts) for lasts in (False, True))
    assert of_attempt is not None and of_attempt.try_get("k") is None  # noqa: PT018
    assert again is not None and again.try_get("k") == 1  # noqa: PT018
