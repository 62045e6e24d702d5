"""Starts of a job after an earlier one: which run is continued, by what record, and where its rows go on."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import wandb
from strangers import OBSTACLES, give_away

import dist_wandb
from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.restart import next_row, resuming
from dist_wandb.restart.records import RestartRecord
from dist_wandb.restart.store import DIRECTORY, RestartStore
from dist_wandb.runs import requested
from dist_wandb.session import registry
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.options import Options
from dist_wandb.store import job_identity, job_store
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from tests.conftest import FakeRun, FakeWandb, OnRanks

RECORDS = Path("wandb") / DIRECTORY
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
Start = Callable[..., list[Session]]


def ranks(number: int) -> list[Topology]:
    return [Topology(rank, rank, 0, number, number, 1) for rank in range(number)]


@pytest.fixture
def start(fake_wandb: FakeWandb, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> Start:  # noqa: ARG001  # goes first
    """Start a job of two ranks once more, with the environment that its launcher gives it.

    With `agent` its store outlasts the processes, as torchrun's does. Otherwise the ranks meet in a store that does
    not, or with ``store=False`` in none.
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
        # ranks are threads here, and so have no SLURM_PROCID each
        monkeypatch.setattr(job_identity, "job_name", lambda _: Launch.detect().slurm_step)
        given = {"run_mode": "new", "reduce": None, "limits": Limits(join_timeout=10.0), **(options or {})}
        return on_ranks(
            world,
            lambda rank: open_session(
                Options(**given), arguments, integration="test", topology=ranks(world)[rank], number=number
            ),
        )

    return start


def kill(sessions: list[Session]) -> None:
    """Let a job end as by SIGKILL: nothing of it is called again."""
    for session in sessions:
        registry._sessions.remove(session)


def attempt(number: int, place: str = "/agent/none_y") -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": f"{place}/attempt_{number}/0/error.json",
    }


def ids(sessions: list[Session]) -> list[str | None]:
    return [session.id for session in sessions]


def given(fake_wandb: FakeWandb, name: str, *, last: int = 2) -> list[Any]:
    """What the last calls of `wandb.init` were given under a name."""
    return [arguments.get(name) for arguments in fake_wandb.arguments[-last:]]


def record_files() -> list[str]:
    return sorted(path.name.partition("-")[0] for path in RECORDS.glob("*.json")) if RECORDS.exists() else []


def last_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- restarts by torchrun ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("directory", ["here", "elsewhere"])
def test_a_restart_of_torchrun_continues_by_the_agents_store(
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


def test_a_restart_continues_by_the_record_where_no_store_outlasts_it(start: Start, fake_wandb: FakeWandb) -> None:
    first = start(environ=attempt(0))
    kill(first)
    second = start(environ=attempt(1))
    assert ids(second) == ids(first)
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize("environ", [attempt(1, "/agent/none_z"), {"TORCHELASTIC_RESTART_COUNT": "1"}])
def test_another_start_of_torchrun_is_no_restart(start: Start, environ: dict[str, str]) -> None:
    """Its first attempt may have died before it left a record of its own."""
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
def test_a_run_that_has_ended_well_is_not_continued(start: Start, by_store: bool) -> None:
    agent = dist.HashStore() if by_store else None
    first = start(agent=agent, environ=attempt(0))
    for session in first:
        session.finish()
    assert not RECORDS.exists()
    assert ids(start(agent=agent, environ=attempt(1))) != ids(first)


def test_a_job_that_has_ended_well_does_not_take_up_anothers_runs(start: Start) -> None:
    agent = dist.HashStore()
    for session in start(agent=agent):
        session.finish()
    other = start()
    kill(other)
    assert not set(ids(start(agent=agent, environ=attempt(1), resume="auto"))) & set(ids(other))


def test_a_run_that_has_failed_is(start: Start) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    for session in first:
        session.finish(exit_code=1)
    assert ids(start(agent=agent, environ=attempt(1))) == ids(first)


@pytest.mark.parametrize("way", ["argument", "settings", "environment"])
def test_never_is_never(start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
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


def test_must_stays_must(start: Start, fake_wandb: FakeWandb) -> None:
    agent = dist.HashStore()
    first = start(agent=agent)
    kill(first)
    assert ids(start(agent=agent, environ=attempt(1), resume="must")) == ids(first)
    assert given(fake_wandb, "resume") == ["must", "must"]


@pytest.mark.parametrize(("wanted", "resume"), [("exp", "allow"), ("other", None)])
def test_the_users_own_id_holds_and_is_resumed_if_it_is_the_earlier_one(
    start: Start, fake_wandb: FakeWandb, wanted: str, resume: str | None
) -> None:
    agent = dist.HashStore()
    kill(start(agent=agent, id="exp"))
    assert ids(start(agent=agent, environ=attempt(1), id=wanted)) == [f"{wanted}-rank-0", f"{wanted}-rank-1"]
    assert given(fake_wandb, "resume") == [resume, resume]


def test_a_run_that_is_rewound_is_left_to_the_user(start: Start, fake_wandb: FakeWandb) -> None:
    agent = dist.HashStore()
    kill(start(agent=agent, options={"run_mode": "auto"}, resume_from="abc?_step=3"))
    start(agent=agent, options={"run_mode": "auto"}, environ=attempt(1), resume_from="abc?_step=3")
    assert given(fake_wandb, "resume", last=1) == [None]


def test_the_sessions_of_a_job_are_told_apart(start: Start) -> None:
    agent = dist.HashStore()
    first, second = start(agent=agent), start(agent=agent, number=2)
    kill(first + second)
    assert ids(start(agent=agent, environ=attempt(1), number=2)) == ids(second)
    assert ids(start(agent=agent, environ=attempt(1))) == ids(first)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_ranks_continues_what_it_can(
    start: Start, fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str], world: int
) -> None:
    """Fewer ranks leave the runs of the others as they are; more ranks open new ones in the same group."""
    agent = dist.HashStore()
    first = start(agent=agent, environ=attempt(0))
    base_id = first[0].plan.base_id
    kill(first)
    start(agent=agent, environ=attempt(1), world=world)
    expected = [base_id] if world == 1 else [f"{base_id}-rank-{rank}" for rank in range(world)]
    assert sorted(given(fake_wandb, "id", last=world)) == expected
    assert given(fake_wandb, "resume", last=world) == ["allow"] * world
    assert set(given(fake_wandb, "group", last=world)) == ({None} if world == 1 else {base_id})
    said = capsys.readouterr().err
    assert f"continues the run {base_id} of an earlier start (restart 1 of torchrun)." in said
    assert f"It had 2 ranks, and has {world} now." in said


def test_an_agent_that_does_not_answer_is_no_obstacle(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**AGENT, **attempt(1)}.items():
        monkeypatch.setenv(name, value)
    open_session(Options(limits=Limits(join_timeout=0.2)), {}, integration="test", topology=Topology.single()).finish()
    assert fake_wandb.arguments == [{}]


# --- restarts by SLURM ------------------------------------------------------------------------------------------------


def requeue(number: int, **other: str) -> dict[str, str]:
    return {**SLURM, "SLURM_RESTART_COUNT": str(number), **other}


def test_a_requeued_job_continues_by_its_record(start: Start, fake_wandb: FakeWandb) -> None:
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


def test_the_same_command_once_more_in_a_job_is_not_a_restart(start: Start) -> None:
    kill(start(environ=SLURM))
    again = start(environ=requeue(1))
    kill(again)
    by_the_same_script = start(environ=requeue(1))
    assert ids(by_the_same_script) != ids(again)
    kill(by_the_same_script)
    assert ids(start(environ=requeue(2))) == ids(by_the_same_script)


def test_jobs_that_share_a_directory_each_find_their_own(start: Start) -> None:
    """As the tasks of an array do; what one of them takes back is its own."""
    other, first = start(environ={**SLURM, "SLURM_JOB_ID": "8"}), start(environ=SLURM)
    for session in other:
        session.finish()
    assert record_files() == ["job", "latest"]  # both of them the first one's
    kill(first)
    again = start(environ=requeue(1))
    assert ids(again) == ids(first)
    kill(again)
    assert ids(start(environ={"SLURM_JOB_ID": "9"}, resume="auto")) == ids(first)
    assert record_files() == ["job", "latest"]  # of the third job, which goes on with the first one's runs


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_without_a_store_the_jobs_name_gives_the_id_at_every_start(
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


def test_without_a_store_no_rank_follows_a_record_that_the_others_may_not_see(start: Start) -> None:
    kill(start(environ=SLURM))
    second = start(store=False, environ=requeue(1))
    assert [str(name).partition("-")[0] for name in ids(second)] == [second[0].plan.base_id] * 2


# --- resume="auto" ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", ["auto", True])
@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_a_second_start_continues_if_it_is_asked_to(
    start: Start, fake_wandb: FakeWandb, run_mode: str, resume: Any
) -> None:
    options = {"run_mode": run_mode}
    first = start(options=options, resume=resume)
    before = ids(first)
    kill(first)
    assert ids(start(options=options, resume=resume)) == before
    assert set(given(fake_wandb, "resume", last=1)) == {"allow"}  # W&B's own record would be one process's


def test_a_second_start_that_does_not_ask_begins_anew_and_is_the_one_to_be_found(start: Start) -> None:
    first = start()
    kill(first)
    second = start()
    kill(second)
    assert ids(second) != ids(first)
    assert ids(start(resume="auto")) == ids(second)


def test_a_run_that_has_ended_well_is_not_continued_by_auto(start: Start) -> None:
    first = start(resume="auto")
    for session in first:
        session.finish()
    assert record_files() == []
    assert ids(start(resume="auto")) != ids(first)


def test_one_rank_that_asks_is_enough_if_it_is_rank_0(start: Start, fake_wandb: FakeWandb, on_ranks: OnRanks) -> None:
    kill(start())
    store = dist.HashStore()
    job_store._store_of_agent = lambda *_: store  # undone with the fixture's own
    options = Options("new", reduce=None, limits=Limits(join_timeout=10.0))
    on_ranks(
        2,
        lambda rank: open_session(
            options, {"resume": "auto"} if rank == 0 else {}, integration="test", topology=ranks(2)[rank], number=1
        ),
    )
    assert given(fake_wandb, "resume") == ["allow", "allow"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"options": {"run_mode": "shared"}}, "run_mode was 'new', and is 'shared'"),
        ({"options": {"rank_scope": "worker"}}, "rank_scope was 'global', and is 'worker'"),
    ],
)
def test_other_runs_than_the_records_are_made_anew(
    start: Start, caplog: pytest.LogCaptureFixture, change: dict[str, Any], said: str
) -> None:
    first = start()
    kill(first)
    assert start(resume="auto", **change)[0].plan.base_id != first[0].plan.base_id
    (warning,) = last_warnings(caplog)
    assert f"the run {first[0].plan.base_id} of an earlier start" in warning
    assert said in warning


def test_the_sessions_of_a_job_have_records_of_their_own(start: Start) -> None:
    first, second = start(), start(number=2)
    kill(first + second)
    assert ids(start(resume="auto", number=2)) == ids(second)
    assert ids(start(resume="auto")) == ids(first)


@pytest.mark.parametrize("argument", ["project", "entity"])
def test_projects_in_one_directory_do_not_mix(start: Start, argument: str) -> None:
    first, second = start(**{argument: "a"}), start(**{argument: "b"})
    kill(first + second)
    assert ids(start(resume="auto", **{argument: "a"})) == ids(first)
    assert ids(start(resume="auto", **{argument: "b"})) == ids(second)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b'{"format": 2}', b'{"format": 1, "base_id": "x"}'],
    ids=["empty", "binary", "list", "newer", "part"],
)
def test_a_damaged_record_is_left_aside_with_a_warning(
    start: Start, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    first = start()
    kill(first)
    (record,) = RECORDS.glob("latest-*.json")
    record.write_bytes(content)
    assert ids(start(resume="auto")) != ids(first)
    record.write_bytes(content)
    start(resume="auto")
    (warning,) = last_warnings(caplog)  # of both starts, as they are of one process
    assert f"{record} is not the restart record that an earlier start of this job would have left there" in warning


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_lies_in_the_place_of_a_record_keeps_no_start_waiting(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    first = start()
    kill(first)
    (record,) = RECORDS.glob("latest-*.json")
    record.unlink()
    OBSTACLES[obstacle](record)
    begun = time.monotonic()
    sessions = start(resume="auto")
    assert time.monotonic() - begun < 30
    assert ids(sessions) != ids(first)
    warning, *others = last_warnings(caplog)
    assert f"{record} is not the restart record that an earlier start of this job would have left there" in warning
    assert len(others) == (obstacle == "directory")  # in whose place no record can be left
    assert record.is_file() == (obstacle != "directory")


@pytest.mark.parametrize("what", ["record", "directory"])
def test_a_strangers_record_is_not_followed(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first = start()
    kill(first)
    (record,) = RECORDS.glob("latest-*.json")
    give_away(record if what == "record" else RECORDS, monkeypatch)
    second = start(resume="auto")
    assert ids(second) != ids(first)
    warnings = last_warnings(caplog)
    place = record if what == "record" else RECORDS
    assert (
        f"{place} belongs to user 65534, while this process runs as {os.getuid()}, so it is not trusted" in warnings[0]
    )
    assert len(warnings) == 1 + (what == "directory")
    if what == "directory":
        assert f"no restart record of the run {second[0].plan.base_id} could be left in {RECORDS}" in warnings[1]


def test_a_link_in_the_place_of_the_directory_is_not_followed(
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


def test_records_are_the_users_alone(start: Start) -> None:
    start()
    (record,) = RECORDS.iterdir()
    assert (RECORDS.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)


@pytest.mark.parametrize("changed", [{"run_mode": "\x1b[2J"}, {"rank_scope": ""}, {"project": 7}, {"job": []}])
def test_a_record_that_nobody_would_have_left_is_none(changed: dict[str, Any]) -> None:
    record = RestartRecord("a", "test/1", None, None, "new", "global", 2, None, 0)
    assert RestartRecord.of(record.as_json) == record
    with pytest.raises(ValueError, match=r"unknown|not text"):
        RestartRecord.of({**record.as_json, **changed})


def test_a_record_with_an_id_that_wandb_refuses_is_damaged() -> None:
    record = RestartRecord("a/b", "test/1", None, None, "new", "global", 2, None, 0)
    with pytest.raises(ValueError, match="refuses in run ids"):
        RestartRecord.of(record.as_json)


def test_without_a_store_only_rank_0_alone_can_be_asked_for_it(start: Start, fake_wandb: FakeWandb) -> None:
    first = start(store=False, options={"run_mode": "auto"})
    kill(first)
    start(store=False, options={"run_mode": "auto"}, resume="auto")
    assert given(fake_wandb, "id") == [first[0].id] * 2
    with pytest.raises(ConfigurationError, match="resume='auto' takes the run id from a restart record"):
        start(store=False, resume="auto")


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_started(start: Start) -> None:
    (first, _) = start(environ=SLURM, project="digits", dir="place")
    directory = Path("place") / RECORDS
    assert {json.dumps(json.loads(path.read_text())) for path in directory.iterdir()} == {
        json.dumps(
            {
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
            }
        )
    }
    assert sorted(path.name.partition("-")[0] for path in directory.iterdir()) == ["job", "latest"]


def test_rank_0_alone_leaves_a_record(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    monkeypatch.setattr(RestartStore, "leave", lambda _, base_id: left.append(base_id))
    first = start()
    assert left == [first[0].plan.base_id]


def test_disabled_leaves_nothing(start: Start) -> None:
    start(mode="disabled")
    assert not Path("wandb").exists()


@pytest.mark.parametrize("obstacle", ["wandb", str(RECORDS)])
def test_where_no_record_can_be_left_there_is_one_warning(
    start: Start, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    Path("place", obstacle).parent.mkdir(parents=True)
    Path("place", obstacle).touch()
    sessions = start(dir="place", options={"run_mode": "auto"}, environ=SLURM)
    sessions[0].finish()
    (warning,) = last_warnings(caplog)
    assert f"no restart record of the run {sessions[0].id} could be left in {Path('place') / RECORDS}" in warning


def test_a_run_finished_by_the_user_is_not_continued(start: Start, fake_wandb: FakeWandb) -> None:
    start(options={"run_mode": "auto"})
    assert record_files() == ["latest"]
    fake_wandb.runs[0]._is_finished = True  # as wandb.finish() does
    dist_wandb.get_run()
    assert record_files() == []


# --- a world of one ---------------------------------------------------------------------------------------------------


def test_a_world_of_one_is_continued_by_its_id(fake_wandb: FakeWandb) -> None:
    first = dist_wandb.init("digits")
    kill([first])
    resuming._started.clear()  # as in a new process
    assert dist_wandb.init("digits", resume="auto").id == first.id
    assert given(fake_wandb, "resume", last=1) == ["auto"]  # W&B keeps its own record up to date
    assert given(fake_wandb, "id", last=1) == [first.id]


def test_a_run_that_is_not_ours_is_left_to_its_owner(fake_wandb: FakeWandb) -> None:
    theirs: Any = fake_wandb.init(id="theirs")
    open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    assert record_files() == []


# --- where rows go on -------------------------------------------------------------------------------------------------


def resumed(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, **summary: Any) -> None:
    """Let W&B find that the runs which are opened from now on have been started before."""
    opened = fake_wandb.init

    def init(**arguments: Any) -> FakeRun:
        run = opened(**arguments)
        run.resumed, run.summary = True, summary
        return run

    monkeypatch.setattr(fake_wandb, "init", init)


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("reduce", ["mean", None])
def test_rows_without_a_step_go_on_behind_those_of_the_resumed_run(
    start: Start,
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    on_ranks: OnRanks,
    run_mode: str,
    reduce: str | None,
) -> None:
    options = {"run_mode": run_mode, "reduce": reduce, "limits": Limits(heartbeat=0.05)}
    kill(start(options={**options, "reduce": None}))
    resumed(fake_wandb, monkeypatch, global_step=49, loss=0.5)
    sessions = start(options=options, resume="auto")
    for _ in range(2):
        for session in sessions:
            session.log({"loss": 1.0})
    on_ranks(2, lambda rank: sessions[rank].finish())
    opened = [session.run for session in sessions if session.run]
    for run in opened:
        assert {row["global_step"] for row in run.rows} == {50, 51}  # type: ignore[attr-defined]


def test_a_step_that_is_given_stays(start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(start(world=1))
    resumed(fake_wandb, monkeypatch, global_step=49)
    (session,) = start(world=1, resume="auto")
    session.log({"loss": 1.0}, step=3)
    session.log({"loss": 1.0, "global_step": 4})
    assert [row["global_step"] for row in fake_wandb.runs[-1].rows] == [3, 4]


@pytest.mark.parametrize(
    ("summary", "first"),
    [({}, 0), ({"global_step": "x"}, 0), ({"global_step": float("nan")}, 0), ({"global_step": 4.0}, 5)],
)
def test_the_summary_tells_the_last_row(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, summary: dict[str, Any], first: int
) -> None:
    resumed(fake_wandb, monkeypatch, **summary)
    (session,) = start(world=1, id="exp", resume="allow")
    session.log({"loss": 1.0})
    assert fake_wandb.runs[-1].rows == [{"loss": 1.0, "global_step": first}]


def test_a_run_that_is_not_resumed_begins_at_0(fake_wandb: FakeWandb) -> None:
    theirs: Any = fake_wandb.init(id="theirs")
    theirs.summary["global_step"] = 7
    session = open_session(Options(), {}, integration="test", adopt=lambda _: theirs)
    session.log({"loss": 1.0})
    assert theirs.rows == [{"loss": 1.0, "global_step": 0}]


def test_all_writers_of_a_shared_run_go_on_where_its_primary_does(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others attach later: the summary that they are given may hold rows of this start."""
    last = iter([49, 53])
    opened = fake_wandb.init

    def init(**arguments: Any) -> FakeRun:
        run = opened(**arguments)
        run.resumed, run.summary = True, {"global_step": next(last)}
        return run

    monkeypatch.setattr(fake_wandb, "init", init)
    sessions = start(options={"run_mode": "shared"}, id="exp", resume="allow")
    assert [session._intake.first_row for session in sessions] == [50, 50]


def test_offline_the_files_of_the_run_tell_the_last_row(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest that has any rows; the file of this start, and those of other runs, do not count."""
    own = "run-0"
    files = {
        "offline-run-1-exp": 99,
        "offline-run-2-exp": 49,
        "offline-run-3-exp": None,
        "offline-run-4-exp2": 7,
        own: 9,
    }
    for number, name in enumerate(files):
        place = fake_wandb.directory / name
        place.mkdir(parents=True)
        file = place / ("run-exp.wandb" if name == own else f"run-{name.rpartition('-')[2]}.wandb")
        file.touch()
        os.utime(file, (number, number))

    monkeypatch.setattr(next_row, "largest_step", lambda path, _: files[path.parent.name])
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    session.log({"loss": 1.0})
    assert fake_wandb.runs[-1].rows == [{"loss": 1.0, "global_step": 50}]
    (other,) = start(world=1, id="exp", mode="offline")
    assert other._intake.first_row == 0


@pytest.mark.parametrize("fails", [False, True])
def test_files_of_strangers_do_not_end_a_start(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """What cannot be read counts for nothing."""
    for name in ("run-0", "offline-run-1-exp", "offline-run-2-exp"):
        (fake_wandb.directory / name).mkdir(parents=True)
    (fake_wandb.directory / "offline-run-1-exp" / "run-exp.wandb").symlink_to("nowhere")
    (fake_wandb.directory / "offline-run-2-exp" / "run-exp.wandb").touch()
    (fake_wandb.directory / "offline-run-3-exp").symlink_to("offline-run-3-exp")

    def largest(path: Path, _: str) -> int:
        if fails:
            raise ReadError(f"{path}: cannot be read: Resource temporarily unavailable.")
        return 5

    monkeypatch.setattr(next_row, "largest_step", largest)
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    assert session._intake.first_row == (0 if fails else 6)


def test_a_strangers_file_of_the_run_does_not_say_where_its_rows_go_on(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = fake_wandb.directory / "offline-run-1-exp" / "run-exp.wandb"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    (fake_wandb.directory / "run-0").mkdir()
    true_stat = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = true_stat(path)
        return os.stat_result((*found[:4], 65_534, *found[5:])) if path == theirs else found

    monkeypatch.setattr(Path, "lstat", lstat)
    monkeypatch.setattr(next_row, "largest_step", lambda _path, _name: 2**53)
    (session,) = start(world=1, id="exp", resume="allow", mode="offline")
    assert session._intake.first_row == 0
    (warning,) = last_warnings(caplog)
    assert f"{theirs} belongs to user 65534, so rows without a step are not counted on" in warning


def test_of_many_files_of_a_run_the_newest_are_looked_at(
    start: Start, fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake_wandb.directory / "run-0").mkdir(parents=True)
    for number in range(100):
        (fake_wandb.directory / f"offline-run-{number}-exp").mkdir(parents=True)
        (fake_wandb.directory / f"offline-run-{number}-exp" / "run-exp.wandb").touch()
    looked_at: list[Path] = []
    monkeypatch.setattr(next_row, "largest_step", lambda path, _: looked_at.append(path))
    start(world=1, id="exp", resume="allow", mode="offline")
    assert len(looked_at) == 32


def test_a_step_metric_of_a_framework_is_not_counted(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    resumed(fake_wandb, monkeypatch, **{"trainer/global_step": 49})
    session = open_session(Options(), {}, integration="test", step_metric="trainer/global_step")
    session.log({"loss": 1.0})
    assert fake_wandb.runs[-1].rows == [{"loss": 1.0}]


# --- what the launchers tell ------------------------------------------------------------------------------------------


def test_launchers_name_what_they_start_again() -> None:
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
def test_what_the_user_said_of_resuming(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], environ: dict[str, str], wanted: str | None
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert requested.wanted_resume(arguments) == wanted


def test_keys_of_all_attempts_are_those_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(job_store, "_store_of_agent", lambda *_: store)
    lasting = JobStore.find("a", Topology.single(), 1.0, lasting=True)
    assert lasting is not None
    lasting.publish("k", 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    of_attempt, again = (JobStore.find("a", Topology.single(), 1.0, lasting=lasts) for lasts in (False, True))
    assert of_attempt is not None and of_attempt.try_get("k") is None  # noqa: PT018
    assert again is not None and again.try_get("k") == 1  # noqa: PT018
