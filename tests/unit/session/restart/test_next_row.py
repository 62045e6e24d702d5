"""The position on the x axis at which the rows of a resumed run continue."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fakes import FakeRun, FakeWandb, on_ranks, open_rank
from restarts import Start, kill, last_warnings

from dist_wandb.errors import ReadError
from dist_wandb.runs import wandb_private
from dist_wandb.session.session import Session


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
