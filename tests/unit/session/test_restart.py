"""Restarts: which run a job continues, from which record, and at which row."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import wandb
from fakes import FakeRun, FakeWandb, on_ranks, open_rank, ranks
from new_process import begin_new_process
from strangers import OBSTACLES, give_away

import dist_wandb
from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.job import job_identity, job_store
from dist_wandb.job.launch import Launch
from dist_wandb.job.topology import Topology
from dist_wandb.runs import wandb_private
from dist_wandb.session import registry
from dist_wandb.session.opener import open_session
from dist_wandb.session.restart import DIRECTORY, RestartStore
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options

RECORDS = Path("wandb") / DIRECTORY
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
Start = Callable[..., list[Session]]


def kill(sessions: list[Session]) -> list[Session]:
    """End a job as SIGKILL does: none of its code is called again. Return its sessions."""
    for session in sessions:
        registry.remove(session)
    return sessions


def attempt(number: int, place: str = "/agent/none_y") -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": f"{place}/attempt_{number}/0/error.json",
    }


def ids(sessions: list[Session]) -> list[str | None]:
    return [session.id for session in sessions]


def given(fake_wandb: FakeWandb, name: str, *, last: int = 2) -> list[Any]:
    """Return the values of an argument in the last calls of `wandb.init`."""
    return [arguments.get(name) for arguments in fake_wandb.arguments[-last:]]


def record_files() -> list[str]:
    return sorted(path.name.partition("-")[0] for path in RECORDS.glob("*.json")) if RECORDS.exists() else []


def last_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def start(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> Start:  # noqa: ARG001  # goes first
    """Start a job of two ranks again, with the environment that its launcher sets.

    With `agent`, its store outlives the processes, as torchrun's does. Otherwise the ranks use a store that does not
    or, with ``store=False``, none.
    """

    def start(
        *,
        world: int = 2,
        agent: dist.Store | None = None,
        store: bool = True,
        number: int = 1,
        options: dict[str, Any] | None = None,
        environ: dict[str, str] | None = None,
        **arguments: Any,
    ) -> list[Session]:
        for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", "SLURM_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**(AGENT if agent is not None else {}), **(environ or {})}.items():
            monkeypatch.setenv(name, value)
        met = agent if agent is not None else dist.HashStore() if store else None
        monkeypatch.setattr(job_store, "_store_of_agent", lambda *_: met)
        # ranks are threads here, and share one SLURM_PROCID
        monkeypatch.setattr(job_identity, "job_name", lambda _: Launch.detect().slurm_step)
        given = {"run_mode": "new", "reduce": None, "limits": {"join_timeout": 10.0}, **(options or {})}
        return on_ranks(world, lambda rank: open_rank(ranks(world)[rank], wandb_init=arguments, number=number, **given))

    return start


# --- by torchrun and SLURM --------------------------------------------------------------------------------------------


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


def requeue(number: int, **other: str) -> dict[str, str]:
    return {**SLURM, "SLURM_RESTART_COUNT": str(number), **other}


BY_TORCHRUN = {**attempt(0), "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("first", "second", "is_continued"),
    [
        (BY_TORCHRUN, {**attempt(0), "MASTER_PORT": "2"}, True),  # because of another node: its agent does not count it
        (BY_TORCHRUN, BY_TORCHRUN, False),  # at the same address, a worker of torchrun has started the script twice
        (BY_TORCHRUN, attempt(1, "/agent/none_z"), False),  # its first attempt may have died before it wrote its own
        (BY_TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
        (SLURM, requeue(1), True),
        (SLURM, requeue(1, SLURM_JOB_ID="8"), False),
        (SLURM, requeue(1, SLURM_STEP_ID="1"), False),
        (SLURM, SLURM, False),
    ],
)
def test_a_restart_is_one_of_the_same_job(
    start: Start, first: dict[str, str], second: dict[str, str], is_continued: bool
) -> None:
    assert (ids(kill(start(environ=first))) == ids(start(environ=second))) == is_continued


@pytest.mark.parametrize(("by_store", "arguments"), [(True, {}), (False, {}), (False, {"resume": "auto"})])
def test_a_finished_run_is_not_continued(start: Start, by_store: bool, arguments: dict[str, Any]) -> None:
    agent = dist.HashStore() if by_store else None
    first = start(agent=agent, environ=attempt(0), **arguments)
    for session in first:
        session.finish()
    assert not RECORDS.exists()
    other = kill(start()) if by_store else first
    again = start(agent=agent, environ=attempt(1), **{**arguments, **({"resume": "auto"} if by_store else {})})
    assert not set(ids(again)) & {*ids(first), *ids(other)}


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


def test_a_requeued_job_continues_by_its_own_command_and_with_a_store(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kill(start(environ=SLURM))
    with monkeypatch.context() as of_another_command:
        of_another_command.setattr(sys, "argv", ["other.py"])
        assert ids(start(environ=requeue(1))) != ids(first)
    assert ids(start(environ=requeue(1))) == ids(first)
    assert given(fake_wandb, "resume") == ["allow", "allow"]
    assert ids(start(store=False, environ=requeue(2))) != ids(first)


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


def test_what_does_not_identify_a_start_or_a_step_is_left_out() -> None:
    assert Launch.detect({"TORCHELASTIC_ERROR_FILE": "x"}).torchrun_start is None
    assert Launch.detect({"SLURM_JOB_ID": "7"}).slurm_step == "slurm-7-batch"
    assert Launch.detect({}).slurm_step is None


# --- with resume="auto" -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["auto", True])
@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_a_second_start_continues_with_resume_auto(
    start: Start, fake_wandb: FakeWandb, run_mode: str, resume: Any
) -> None:
    options = {"run_mode": run_mode}
    first = kill(start(options=options, resume=resume))
    assert ids(start(options=options, resume=resume)) == ids(first)
    assert set(given(fake_wandb, "resume", last=1)) == {"allow"}  # W&B's own record would belong to one process


def test_a_second_start_without_resume_makes_new_runs_and_a_new_record(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kill(start())
    second = kill(start())
    assert ids(second) != ids(first)
    monkeypatch.setenv("WANDB_RESUME", "auto")
    third = kill(start(resume=False))
    assert ids(third) != ids(second)
    assert ids(start()) == ids(third)


def test_resume_auto_on_rank_0_alone_is_enough(start: Start, fake_wandb: FakeWandb) -> None:
    kill(start())
    store = dist.HashStore()
    job_store._store_of_agent = lambda *_: store  # undone together with the fixture's patch
    options: dict[str, Any] = {"run_mode": "new", "reduce": None, "limits": {"join_timeout": 10.0}}
    on_ranks(2, lambda rank: open_rank(rank, wandb_init={"resume": "auto"} if rank == 0 else {}, **options))
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"options": {"run_mode": "shared"}}, "run_mode was 'new', and is 'shared'"),
        ({"options": {"rank_scope": "worker"}}, "rank_scope was 'global', and is 'worker'"),
    ],
)
def test_a_record_of_different_options_is_not_used_and_warns(
    start: Start, caplog: pytest.LogCaptureFixture, change: dict[str, Any], reason: str
) -> None:
    first = kill(start())
    assert start(resume="auto", **change)[0].plan.base_id != first[0].plan.base_id
    (warning,) = last_warnings(caplog)
    assert f"the run {first[0].plan.base_id} of an earlier start" in warning
    assert reason in warning


def killed_with_record(start: Start) -> tuple[list[Session], Path]:
    """Return the sessions of a job that was killed, and the restart record that they wrote."""
    sessions = kill(start())
    (record,) = RECORDS.glob("latest-*.json")
    return sessions, record


DAMAGED = [b"", b"\xff", b"[]", b'{"format": 2}', b'{"format": 1, "base_id": "x"}']
INVALID = [{"run_mode": "\x1b[2J"}, {"rank_scope": ""}, {"project": 7}, {"job": []}, {"base_id": "a/b"}]


@pytest.mark.parametrize("content", [*DAMAGED, *INVALID], ids=repr)
def test_a_damaged_record_is_ignored_with_a_warning(
    start: Start, caplog: pytest.LogCaptureFixture, content: bytes | dict[str, Any]
) -> None:
    first, record = killed_with_record(start)
    valid = json.loads(record.read_text())
    for _ in range(2):
        record.write_bytes(content if isinstance(content, bytes) else json.dumps({**valid, **content}).encode())
        assert ids(start(resume="auto")) != ids(first)
    (warning,) = last_warnings(caplog)  # for both starts, because they share a process
    assert f"{record} is not a valid restart record of this job" in warning


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_an_obstacle_in_place_of_a_record_does_not_block_a_start(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    first, record = killed_with_record(start)
    record.unlink()
    OBSTACLES[obstacle](record)
    begun = time.monotonic()
    sessions = start(resume="auto")
    assert time.monotonic() - begun < 30
    assert ids(sessions) != ids(first)
    warning, *others = last_warnings(caplog)
    assert f"{record} is not a valid restart record of this job" in warning
    assert len(others) == (obstacle == "directory")  # which a record cannot replace
    assert record.is_file() == (obstacle != "directory")


@pytest.mark.parametrize("what", ["record", "directory"])
def test_a_record_of_another_user_is_not_trusted(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first, record = killed_with_record(start)
    give_away(record if what == "record" else RECORDS, monkeypatch)
    second = start(resume="auto")
    assert ids(second) != ids(first)
    warning, *others = last_warnings(caplog)
    place = record if what == "record" else RECORDS
    assert f"{place} belongs to user 65534, while this process runs as {os.getuid()}, so it is not trusted" in warning
    could_not = f"could not write a restart record of the run {second[0].plan.base_id} to {RECORDS}"
    assert [could_not in other for other in others] == [True] * (what == "directory")


def test_a_symbolic_link_in_place_of_the_directory_is_not_followed(
    start: Start, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    RECORDS.parent.mkdir()
    RECORDS.symlink_to(elsewhere)
    sessions = start(options={"run_mode": "auto"}, environ=SLURM)
    sessions[0].finish()
    (warning,) = last_warnings(caplog)
    assert f"{RECORDS} is a symbolic link, so it is not the expected directory. Remove it." in warning
    assert list(elsewhere.iterdir()) == []
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_resume_auto_without_a_store_needs_a_single_writer(start: Start, fake_wandb: FakeWandb) -> None:
    first = kill(start(store=False, options={"run_mode": "auto"}))
    start(store=False, options={"run_mode": "auto"}, resume="auto")
    assert given(fake_wandb, "id") == [first[0].id] * 2
    with pytest.raises(ConfigurationError, match="resume='auto' takes the run id from a restart record"):
        start(store=False, resume="auto")


# --- the record that a start writes for a later one -------------------------------------------------------------------


def test_the_record_describes_the_start_and_is_readable_only_by_the_user(start: Start) -> None:
    (first, _) = start(environ={**SLURM, "MASTER_ADDR": "host", "MASTER_PORT": "1"}, project="digits", dir="place")
    records = sorted((Path("place") / RECORDS).iterdir())
    assert [path.name.partition("-")[0] for path in records] == ["job", "latest"]
    expected = {
        "format": 1,
        "base_id": first.plan.base_id,
        "session": "test/1",
        "project": "digits",
        "entity": None,
        "run_mode": "new",
        "rank_scope": "global",
        "world_size": 2,
        "job": "slurm-7-0",
        "requeues": 0,
        "rendezvous": "host:1/0",
    }
    assert [json.loads(path.read_text()) for path in records] == [expected] * 2
    assert [path.stat().st_mode & 0o777 for path in (records[0].parent, *records)] == [0o700, 0o600, 0o600]


def test_only_rank_0_writes_a_record(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(RestartStore, "leave", lambda _, base_id: left.append(base_id))
    first = start()
    assert left == [first[0].plan.base_id]


def test_runs_that_are_disabled_or_adopted_have_no_record(start: Start, fake_wandb: FakeWandb) -> None:
    start(mode="disabled")
    assert not Path("wandb").exists()
    theirs: Any = fake_wandb.init(id="theirs")
    open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    assert record_files() == []


@pytest.mark.parametrize("obstacle", ["wandb", str(RECORDS)])
def test_a_record_that_cannot_be_written_warns_once(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    Path("place", obstacle).parent.mkdir(parents=True)
    Path("place", obstacle).touch()
    sessions = start(dir="place", options={"run_mode": "auto"}, environ=SLURM)
    sessions[0].finish()
    (warning,) = [one for one in last_warnings(caplog) if "so its run is written to" not in one]
    assert f"could not write a restart record of the run {sessions[0].id} to {Path('place') / RECORDS}" in warning


def test_a_run_finished_by_the_user_is_not_continued(start: Start, fake_wandb: FakeWandb) -> None:
    start(options={"run_mode": "auto"})
    assert record_files() == ["latest"]
    fake_wandb.runs[0].end_by_wandb()
    dist_wandb.get_run()
    assert record_files() == []


def test_a_world_of_one_is_continued_by_its_id(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    first = dist_wandb.init("digits")
    kill([first])
    begin_new_process(monkeypatch)
    assert dist_wandb.init("digits", resume="auto").id == first.id
    assert given(fake_wandb, "resume", last=1) == ["allow"]  # W&B would follow its own record, whoever owns it
    assert given(fake_wandb, "id", last=1) == [first.id]


# --- the row at which a resumed run continues -------------------------------------------------------------------------


def changing(fake_wandb: FakeWandb, change: Callable[[FakeRun], object]) -> None:
    """Change the runs that are opened from now on."""
    opened = fake_wandb.init

    def init(**arguments: Any) -> FakeRun:
        run = opened(**arguments)
        change(run)
        return run

    fake_wandb.init = init  # type: ignore[method-assign]


def resumed(fake_wandb: FakeWandb, starting_step: Any = 0, **summary: Any) -> None:
    """Make W&B report that runs opened from now on were started before."""
    facts = {"resumed": True, "summary": summary, "starting_step": starting_step}
    changing(fake_wandb, lambda run: vars(run).update(facts))


def touched(file: Path) -> Path:
    file.parent.mkdir(parents=True)
    file.touch()
    return file


def row_of_next(session: Session) -> int:
    """Return the position of a row that a session with a run logs without a step."""
    session.log({"loss": 1.0})
    assert session.flush()
    run: Any = session.run  # a fake one
    return int(run.rows[-1]["global_step"])


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("reduce", ["mean", None])
def test_rows_without_a_step_continue_after_those_of_the_resumed_run(
    start: Start, fake_wandb: FakeWandb, run_mode: str, reduce: str | None
) -> None:
    options = {"run_mode": run_mode, "reduce": reduce, "limits": {"heartbeat": 0.05}}
    kill(start(options={**options, "reduce": None}))
    resumed(fake_wandb, global_step=49, loss=0.5)
    sessions = start(options=options, resume="auto")
    for _ in range(2):
        for session in sessions:
            session.log({"loss": 1.0})
    on_ranks(2, lambda rank: sessions[rank].finish())
    opened = [session.run for session in sessions if session.run]
    for run in opened:
        assert {row["global_step"] for row in run.rows} == {50, 51}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("last", "starting_step", "first"),
    [(None, 0, 0), ("x", 0, 0), (float("nan"), 0, 0), (4.0, 0, 5), (None, 50, 50), (None, None, 0), (None, "x", 0)],
)
def test_rows_continue_after_the_row_of_the_summary_or_at_wandbs_step(
    start: Start, fake_wandb: FakeWandb, last: Any, starting_step: Any, first: int
) -> None:
    resumed(fake_wandb, starting_step, **({"loss": 0.5} if last is None else {"global_step": last}))
    (session,) = start(world=1, id="exp", resume="allow")
    assert row_of_next(session) == first


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("argument", ["fork_from", "resume_from"])
@pytest.mark.parametrize("knows", [True, False], ids=["known by the run", "only requested"])  # by wandb 0.19 offline
def test_rows_of_a_branch_continue_at_the_branch_point(
    start: Start, fake_wandb: FakeWandb, run_mode: str, mode: str, argument: str, knows: bool
) -> None:
    if knows:
        changing(fake_wandb, lambda run: setattr(run, "starting_step", 6 * ("-rank-1" not in str(run.id))))
    sessions = start(options={"run_mode": run_mode}, mode=mode, **{argument: "abc?_step=5"})
    for session in sessions:
        session.log({"loss": 1.0})
    for run in fake_wandb.runs:
        assert [session.flush() for session in sessions]
        assert {row["global_step"] for row in run.rows} == {6}


def test_all_writers_of_a_shared_run_continue_at_the_primarys_row(start: Start, fake_wandb: FakeWandb) -> None:
    """The others attach later, so the summary that they get may contain rows of this start."""
    last = iter([49, 53])
    changing(fake_wandb, lambda run: vars(run).update(resumed=True, summary={"global_step": next(last)}))
    sessions = start(options={"run_mode": "shared"}, id="exp", resume="allow")
    for session in sessions:
        session.log({"loss": 1.0})
    assert all(session.flush() for session in sessions)
    assert {row["global_step"] for run in fake_wandb.runs for row in run.rows} == {50}


@pytest.mark.usefixtures("store")
def test_all_writers_of_a_shared_run_start_at_the_primarys_row_of_a_frameworks_axis(fake_wandb: FakeWandb) -> None:
    axis, last = "trainer/global_step", iter([49, 53])
    changing(fake_wandb, lambda run: vars(run).update(resumed=True, summary={axis: next(last)}))
    given: dict[str, Any] = {"wandb_init": {"id": "exp", "resume": "allow"}, "run_mode": "shared", "step_metric": axis}
    kind = mock.patch.object(wandb_private, "is_wandbs", return_value=True)
    with kind, mock.patch.object(wandb_private, "set_starting_step") as set_starting_step:
        on_ranks(2, lambda rank: open_rank(rank, **given))
    assert [step for (_, step), _ in set_starting_step.call_args_list] == [50, 50]


def test_the_last_row_of_an_offline_run_is_read_from_its_files(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file with rows is read, except the file of this start and files of other runs."""
    exp, other = "run-exp.wandb", "run-exp2.wandb"
    files = {
        "offline-run-1-exp": (exp, 99),
        "offline-run-2-exp": (exp, 49),
        "offline-run-3-exp": (exp, None),
        "offline-run-4-exp2": (other, 7),
        "run-0": (exp, 9),
    }
    for number, (directory, (name, _)) in enumerate(files.items()):
        file = touched(fake_wandb.directory / directory / name)
        os.utime(file, (number, number))
    monkeypatch.setattr("dist_wandb.wandb_files.reading.largest_step", lambda path, _: files[path.parent.name][1])
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    assert row_of_next(session) == 50
    (new,) = start(world=1, id="exp", mode="offline")
    assert row_of_next(new) == 0


@pytest.mark.parametrize("error", [None, ReadError("cannot be read")])
def test_unreadable_files_do_not_fail_a_start(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    (fake_wandb.directory / "offline-run-1-exp").mkdir(parents=True)
    (fake_wandb.directory / "offline-run-1-exp" / "run-exp.wandb").symlink_to("nowhere")
    touched(fake_wandb.directory / "offline-run-2-exp" / "run-exp.wandb")
    (fake_wandb.directory / "offline-run-3-exp").symlink_to("offline-run-3-exp")
    (fake_wandb.directory / "run-0").mkdir()
    largest = mock.Mock(side_effect=error, return_value=5)
    monkeypatch.setattr("dist_wandb.wandb_files.reading.largest_step", largest)
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    assert row_of_next(session) == (6 if error is None else 0)


def test_files_of_another_user_are_not_read(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = touched(fake_wandb.directory / "offline-run-1-exp" / "run-exp.wandb")
    (fake_wandb.directory / "run-0").mkdir()
    true_stat = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = true_stat(path)
        return os.stat_result((*found[:4], 65_534, *found[5:])) if path == theirs else found

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr("dist_wandb.wandb_files.reading.largest_step", lambda _path, _name: 2**53)
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    assert row_of_next(session) == 0
    (warning,) = last_warnings(caplog)
    assert f"{theirs} belongs to user 65534, so rows without a step do not continue" in warning


def test_only_the_newest_files_of_a_run_are_read(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_wandb.directory / "run-0").mkdir(parents=True)
    for number in range(100):
        touched(fake_wandb.directory / f"offline-run-{number}-exp" / "run-exp.wandb")
    looked_at: list[Path] = []
    monkeypatch.setattr("dist_wandb.wandb_files.reading.largest_step", lambda path, _: looked_at.append(path))
    start(world=1, id="exp", resume="allow", mode="offline")
    assert len(looked_at) == 32
