"""Restarts by torchrun and SLURM: which run is continued, and from which record."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import wandb
from fakes import FakeWandb
from restarts import AGENT, RECORDS, SLURM, Start, attempt, given, ids, kill, record_files

from dist_wandb.job.launch import Launch
from dist_wandb.job.topology import Topology
from dist_wandb.runs import requested
from dist_wandb.session.opener import open_session
from dist_wandb.settings.options import Limits, Options


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("directory", ["here", "elsewhere"])
def test_a_torchrun_restart_continues_through_the_agents_store(
    start: Start, fake_wandb: FakeWandb, run_mode: str, directory: str
) -> None:
    agent, options = dist.HashStore(), {"run_mode": run_mode}
    first = kill(start(agent=agent, options=options, dir="here"))
    writers = 1 if run_mode == "auto" else 2
    assert given(fake_wandb, "resume", last=writers) == [None] * writers
    second = start(agent=agent, options=options, environ=attempt(1), dir=directory)
    assert ids(second) == ids(first)
    assert given(fake_wandb, "resume", last=writers) == ["allow"] * writers


@pytest.mark.parametrize(("port", "is_continued"), [("2", True), ("1", False)])
def test_a_restart_because_of_another_node_is_known_by_its_address(start: Start, port: str, is_continued: bool) -> None:
    """The node's agent does not count it. At the same address, a worker of torchrun has started the script twice."""
    first = kill(start(environ={**attempt(0), "MASTER_PORT": "1"}))
    second = start(environ={**attempt(0), "MASTER_PORT": port})
    assert (ids(second) == ids(first)) == is_continued


@pytest.mark.parametrize("environ", [attempt(1, "/agent/none_z"), {"TORCHELASTIC_RESTART_COUNT": "1"}])
def test_another_torchrun_start_is_not_a_restart(start: Start, environ: dict[str, str]) -> None:
    """Its first attempt may have died before it wrote its own record."""
    first = kill(start(environ=attempt(0)))
    assert ids(start(environ=environ)) != ids(first)


@pytest.mark.parametrize(("by_store", "arguments"), [(True, {}), (False, {}), (False, {"resume": "auto"})])
def test_a_finished_run_is_not_continued(start: Start, by_store: bool, arguments: dict[str, Any]) -> None:
    agent = dist.HashStore() if by_store else None
    first = start(agent=agent, environ=attempt(0), **arguments)
    for session in first:
        session.finish()
    assert not RECORDS.exists()
    assert ids(start(agent=agent, environ=attempt(1), **arguments)) != ids(first)


def test_a_finished_job_does_not_continue_runs_of_another(start: Start) -> None:
    agent = dist.HashStore()
    for session in start(agent=agent):
        session.finish()
    other = kill(start())
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
    first = kill(start(agent=agent))
    arguments: dict[str, dict[str, Any]] = {
        "argument": {"resume": "never"},
        "settings": {"settings": wandb.Settings(resume="never")},
        "environment": {},
    }
    monkeypatch.setenv("WANDB_RESUME", "never" if way == "environment" else "auto")
    second = start(agent=agent, environ=attempt(1), **arguments[way])
    assert ids(second) != ids(first)
    assert "allow" not in given(fake_wandb, "resume")


@pytest.mark.parametrize(
    ("before", "now", "resume"),
    [
        ({"id": "exp"}, {"id": "exp"}, "allow"),
        ({"id": "exp"}, {"id": "other"}, None),
        ({}, {"resume": "must"}, "must"),
        ({"resume_from": "abc?_step=3"}, {"resume_from": "abc?_step=3"}, None),
    ],
    ids=["id", "another id", "must", "rewound"],
)
def test_the_users_id_and_resume_have_precedence(
    start: Start, fake_wandb: FakeWandb, before: dict[str, str], now: dict[str, str], resume: str | None
) -> None:
    agent, options = dist.HashStore(), {"run_mode": "auto"}
    first = kill(start(agent=agent, options=options, **before))
    assert ids(start(agent=agent, options=options, environ=attempt(1), **now)) == [now.get("id", first[0].id)] * 2
    assert given(fake_wandb, "resume", last=1) == [resume]


@pytest.mark.parametrize(
    ("by_store", "which"),
    [(True, {"number": 2}), (False, {"number": 2}), (False, {"project": "b"}), (False, {"entity": "b"})],
)
def test_sessions_and_projects_are_continued_separately(start: Start, by_store: bool, which: dict[str, Any]) -> None:
    agent = dist.HashStore() if by_store else None
    first, second = start(agent=agent), start(agent=agent, **which)
    kill(first + second)
    again: dict[str, Any] = {"agent": agent, "environ": attempt(1), "resume": None if by_store else "auto"}
    assert ids(start(**again, **which)) == ids(second)
    assert ids(start(**again)) == ids(first)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_continues_the_runs_that_remain(
    start: Start, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    """With fewer ranks, the other runs stay unchanged; with more ranks, new ones are opened in the same group."""
    agent = dist.HashStore()
    base_id = kill(start(agent=agent, environ=attempt(0)))[0].plan.base_id
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


def requeue(number: int, **other: str) -> dict[str, str]:
    return {**SLURM, "SLURM_RESTART_COUNT": str(number), **other}


def test_a_requeued_job_continues_from_its_own_record(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from that of another job, step or command."""
    first = kill(start(environ=SLURM))
    for other in ({"SLURM_JOB_ID": "8"}, {"SLURM_STEP_ID": "1"}):
        assert ids(start(environ=requeue(1, **other))) != ids(first)
    with monkeypatch.context() as of_another_command:
        of_another_command.setattr(sys, "argv", ["other.py"])
        assert ids(start(environ=requeue(1))) != ids(first)
    assert ids(start(environ=requeue(1))) == ids(first)
    assert given(fake_wandb, "resume") == ["allow", "allow"]


def test_repeating_a_command_in_a_job_is_not_a_restart(start: Start) -> None:
    kill(start(environ=SLURM))
    again = kill(start(environ=requeue(1)))
    by_the_same_script = kill(start(environ=requeue(1)))
    assert ids(by_the_same_script) != ids(again)
    assert ids(start(environ=requeue(2))) == ids(by_the_same_script)


def test_jobs_that_share_a_directory_find_their_own_records(start: Start) -> None:
    """As the tasks of an array do; each deletes only its own record."""
    other, first = start(environ={**SLURM, "SLURM_JOB_ID": "8"}), start(environ=SLURM)
    for session in other:
        session.finish()
    assert record_files() == ["job", "latest"]  # both belong to the first one
    kill(first)
    assert ids(kill(start(environ=requeue(1)))) == ids(first)
    assert ids(start(environ={"SLURM_JOB_ID": "9"}, resume="auto")) == ids(first)
    assert record_files() == ["job", "latest"]  # of the third job, which continues the first one's runs


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_the_job_name_gives_the_same_id_at_every_start_without_a_store(
    start: Start, fake_wandb: FakeWandb, run_mode: str
) -> None:
    options = {"run_mode": run_mode}
    writers = 1 if run_mode == "auto" else 2
    first = kill(start(store=False, environ=SLURM, options=options))
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


@pytest.mark.usefixtures("bare_environment")
def test_resume_may_be_a_truth_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RESUME", "must")
    assert [requested.resume({"resume": value}) for value in (True, False)] == ["auto", None]


def test_what_does_not_identify_a_start_or_a_step_is_left_out() -> None:
    assert Launch.detect({"TORCHELASTIC_ERROR_FILE": "x"}).torchrun_start is None
    assert Launch.detect({"SLURM_JOB_ID": "7"}).slurm_step == "slurm-7-batch"
    assert Launch.detect({}).slurm_step is None
