"""Ranks that never open a session, or open it late, or take long for it: rows are neither held back nor lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from history import STEPS, History, history, history_of
from processes import Finished, clean_environment, run_job, torchrun
from stored import ended_runs, read_history

import dist_wandb

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """One job of three ranks with all scenarios, and the directory of its runs."""
    directory = tmp_path_factory.mktemp("who-opens")
    commands = torchrun(SCRIPTS / "who_opens.py", directory, processes=3)
    return directory, run_job(*commands, cwd=directory).check()


@pytest.mark.parametrize(("kind", "loss"), [("ends", 1.5), ("ends-alone", 1.0)])
def test_the_lowest_rank_writes_everything_if_the_primary_has_no_session_when_it_ends(
    job: tuple[Path, Finished], kind: str, loss: float
) -> None:
    found = history(job[0] / kind)
    assert found.last("loss") == {step: step + loss for step in range(STEPS)}
    assert found.last("text") == dict.fromkeys(range(STEPS), "1")
    assert not found.is_flagged


def test_a_primary_that_comes_too_late_joins_without_a_second_run(job: tuple[Path, Finished]) -> None:
    found = history(job[0] / "late")
    alone, together = range(STEPS), range(STEPS, 2 * STEPS)
    assert found.last("loss") == {**{step: step + 1.5 for step in alone}, **{step: step + 1.0 for step in together}}
    assert found.last("text") == dict.fromkeys([*alone, *together], "1")
    assert not found.is_flagged


def test_a_primary_that_still_opens_the_run_of_the_enclosing_session_is_waited_for(job: tuple[Path, Finished]) -> None:
    (directory,) = (job[0] / "nested").rglob("offline-run-*-exp")
    found = history(directory)
    assert found.last("loss") == {step: step + 1.0 for step in range(STEPS)}
    assert found.last("text") == dict.fromkeys(range(STEPS), "0")
    assert not found.is_flagged


def test_a_rank_that_begins_to_write_has_done_so_from_the_start_for_its_script(job: tuple[Path, Finished]) -> None:
    found = history(job[0] / "continued")
    assert [row["global_step"] for row in found.rows] == list(range(STEPS + 3))
    assert found.last("beside") == {STEPS + 1: 1.0}  # logged with wandb's function while the run was opened
    (run,) = dist_wandb.read_runs(job[0] / "continued")
    expected = {"best": 0.25, "again": -1, "after": 2}
    assert {name: run.summary.get(name) for name in expected} == expected
    assert {name: run.config.get(name) for name in ("lr", "written")} == {"lr": 0.1, "written": 1}


def test_one_line_names_the_rank_that_writes(job: tuple[Path, Finished]) -> None:
    assert job[1].output.count("Pass primary_rank=1 to init on all ranks") == 4  # one for each session
    assert "has not opened a session, so the run has the numbers" not in job[1].output


def of_early_death(directory: Path, rank: int, join: float, finish: float, **environment: str) -> tuple[History, str]:
    """Run a job in which a rank dies before any writes; return the run with the numbers of all, and the output.

    Another run, without a reduction, has the rows of one rank.
    """
    command = torchrun(SCRIPTS / "dies_early.py", directory, str(rank), str(join), str(finish), processes=4)
    environment = clean_environment(**environment)
    finished = run_job(*command, cwd=directory, environment=environment, timeout=150).check()
    combined, own = history(directory / "combined"), history(directory / "own")
    assert own.values("loss") == [step + own.values("loss")[0] for step in range(STEPS)]
    assert not own.is_flagged
    assert f"so rank {own.values('loss')[0]:.0f} writes it" in finished.output
    return combined, finished.output


def test_one_rank_writes_its_rows_if_the_host_of_the_store_ends_before_any_rank_writes(tmp_path: Path) -> None:
    combined, output = of_early_death(tmp_path, 0, 60, 60, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    first = combined.values("loss")[0]
    assert combined.values("loss") == [step + first for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {3}
    others = {1, 2, 3} - {int(first)}
    assert {rank for rank in (1, 2, 3) if f"what rank {rank} logged" in output} == others


def test_ranks_that_wait_no_longer_write_their_rows_if_the_lowest_has_died(tmp_path: Path) -> None:
    combined, _ = of_early_death(tmp_path, 1, 60, 3)
    assert combined.final("loss") == [step + 2.5 for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {1}


def test_a_rank_that_dies_before_any_writes_is_missing(tmp_path: Path) -> None:
    combined, output = of_early_death(tmp_path, 2, 5, 20)
    assert combined.final("loss") == [step + 2.0 for step in range(STEPS)]
    assert set(combined.flags("loss").values()) == {1}
    assert "Rank 2 opened a session, but did not take part" in output
    assert {run.id: run.exit_code for run in dist_wandb.read_runs(tmp_path)} == {"combined": 1, "own": 0}


def test_a_restart_continues_the_run_of_a_rank_that_writes_instead_of_the_primary(tmp_path: Path) -> None:
    command = list(torchrun(SCRIPTS / "who_opens_again.py", tmp_path)[0])
    command.insert(command.index("--standalone"), "--max-restarts=1")
    environment = clean_environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    finished = run_job(command, cwd=tmp_path, environment=environment).check()
    files = sorted(tmp_path.rglob("run-*.wandb"))
    assert len({path.name for path in files}) == 1
    assert sorted(row["loss"] for path in files for row in read_history(path)) == list(range(2 * STEPS))
    assert finished.output.count("of an earlier start (restart 1 of torchrun)") == 1


SLOW = {  # run mode, the rank whose first run ends slowly, and in which sessions the ranks log
    "the session before": ("auto", 0, "11"),
    "an earlier session": ("auto", 0, "101"),
    "a run per rank": ("new", 1, "11"),
}


@pytest.mark.parametrize(("mode", "slow", "logged"), SLOW.values(), ids=SLOW)
def test_ranks_wait_for_one_that_still_ends(mode: str, slow: int, logged: str, tmp_path: Path) -> None:
    finished = run_job(*torchrun(SCRIPTS / "ends_slowly.py", tmp_path, mode, slow, *logged), cwd=tmp_path).check()
    rows = [[0.5] * int(each) for each in logged] * (2 if mode == "new" else 1)
    assert [history_of(run).values("loss") for run in ended_runs(tmp_path, len(rows))] == rows
    assert "has not opened a session" not in finished.output
