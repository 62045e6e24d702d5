"""Jobs that are killed and restarted continue the same runs: no row is missing or duplicated."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import Job, clean_environment, run_job, started, torchrun, wait_until
from stored import PATIENT, find_runs, rows_in
from wandb_records import RecordedRun
from wandb_server import WandbServer

import dist_wandb
from dist_wandb.job.launch import Launch
from dist_wandb.settings.plan import RUN_MODES, RunMode

NOTES = Path("wandb") / "dist-wandb-resume"
RANKS, ROWS, KILLED_AT = 2, 100, 50
PARENT, BRANCHED_ROWS, CONTINUED = 8, 3, 2  # rows


def continue_after_kill(directory: str, run_mode: RunMode, resume: str, group: str) -> None:
    """Log rows without a step; be killed once after half of them, and continue from there after a restart.

    The checkpoint is the number of rows that are safe. torchrun, or the test, restarts it. `resume` is passed to
    `wandb.init` unless empty; `group` creates a process group first.
    """
    place = Path(directory)
    if group:
        dist.init_process_group("gloo")
    checkpoint = place / "checkpoint"
    begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
    given: dict[str, Any] = {"resume": resume} if resume else {}
    run = dist_wandb.init(
        "tests",
        run_mode=run_mode,
        reduce="sum" if run_mode != "new" else None,
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        dir=directory,
        **given,
    )
    rank = run.topology.global_rank
    for row in range(begin, ROWS):
        run.log({"loss": row + 1000.0 * rank})
        if row == KILLED_AT - 1 and begin == 0:
            run.flush()
            (place / f"flushed-{rank}").touch()
            wait_until((place / "go-on").exists, 60, "the test, which has seen the rows")
            if rank == 0:
                checkpoint.write_text(str(KILLED_AT))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the launcher ends this rank
    sys.stdout.write(f"ended {rank} {run.id} attempt {Launch.detect().attempt}\n")
    run.finish()
    if group:
        dist.destroy_process_group()


def log(directory: str, run_mode: Any, rows: int, **given: Any) -> None:
    reduce: Any = None if run_mode == "new" else "mean"
    run = dist_wandb.init("tests", dir=directory, run_mode=run_mode, reduce=reduce, **given)
    dist.barrier()
    for row in range(rows):
        run.log({"loss": float(row)})
        run.flush(together=True)
    run.finish()
    dist.barrier()


def branch(directory: str) -> None:
    """Branch each run after its step 4."""
    dist.init_process_group("gloo")
    for mode in RUN_MODES:
        parent = f"parent-{mode}"
        log(directory, mode, PARENT, id=parent)
        at = f"{parent}-rank-0?_step=4" if mode == "new" else f"{parent}?_step=4"
        log(directory, mode, BRANCHED_ROWS, id=f"fork-{mode}", fork_from=at)
        log(directory, mode, CONTINUED, id=f"fork-{mode}", resume="allow")
        if mode == "auto":
            log(directory, mode, BRANCHED_ROWS, resume_from=at)
            log(directory, mode, CONTINUED, id=parent, resume="allow")
    dist.destroy_process_group()


@pytest.mark.parametrize(("run_mode", "group"), [("auto", ""), ("shared", "group")])
def test_a_restart_by_torchrun_continues_the_same_run(
    wandb_server: WandbServer, tmp_path: Path, run_mode: str, group: str
) -> None:
    """Without a process group, by the agent's store; with one, whose store torchrun separates, by the record file.

    torch's gloo groups do not survive a restart over the agent's store: they find addresses of dead processes.
    """
    environment = wandb_server.environment(tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1" if group else "0")
    command = list(torchrun(continue_after_kill, tmp_path, run_mode, "", group)[0])
    command.insert(command.index("--standalone"), "--max-restarts=1")
    with started(command, cwd=tmp_path, environment=environment) as job:
        writers = RANKS if run_mode == "shared" else 1
        wait_until(lambda: all_flushed(tmp_path), 60)
        wandb_server.wait_until(lambda: sum(len(run.rows) for run in wandb_server.runs.values()) == writers * KILLED_AT)
        assert len(list((tmp_path / NOTES).iterdir())) == 2
        (tmp_path / "go-on").touch()
        output = ended(job, exit_code=0)
    (run,) = wandb_server.runs.values()
    assert output.count(f"continues the run {run.run_id} of an earlier start (restart 1 of torchrun)") == 1
    assert all(steps(run, name) == list(range(ROWS)) for name in names(run))
    assert names(run) == ({"loss", "rank-0/loss", "rank-1/loss"} if run_mode == "shared" else {"loss"})
    assert values(run, "loss") == [2.0 * row + 1000.0 for row in range(ROWS)]
    assert (run.exit_codes, len(run.writers)) == ([0], 2 * writers if run_mode == "shared" else 1)
    assert not (tmp_path / NOTES).exists()


def test_a_second_offline_start_continues_the_runs_of_all_ranks(tmp_path: Path) -> None:
    environment = clean_environment(WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL="1")
    command = torchrun(continue_after_kill, tmp_path, "new", "auto", "")[0]
    with started(command, cwd=tmp_path, environment=environment) as job:
        wait_until(lambda: all_flushed(tmp_path), 60)
        wait_until(lambda: [len(rows) for rows in stored(tmp_path).values()] == [KILLED_AT] * RANKS, 60)
        (tmp_path / "go-on").touch()
        ended(job, exit_code=1)
    before = stored(tmp_path)
    with started(command, cwd=tmp_path, environment=environment) as job:
        output = ended(job, exit_code=0)
    assert "resume='auto', by " in output
    after: dict[str, list[Any]] = {}
    wait_until(lambda: sum(map(len, stored(tmp_path).values())) == RANKS * ROWS, 60)
    for path, rows in stored(tmp_path).items():
        after.setdefault(path.name, []).append([(row["global_step"], row["loss"]) for row in rows])
    assert after.keys() == {path.name for path in before}
    assert [name[:-6].rpartition("-")[2] for name in after] == ["0", "1"]
    for rank, files in enumerate(after.values()):
        expected = [(row, row + 1000.0 * rank) for row in range(ROWS)]
        assert files == [expected[:KILLED_AT], expected[KILLED_AT:]]
    assert not (tmp_path / NOTES).exists()


def all_flushed(directory: Path) -> bool:
    """Return whether all ranks have flushed their rows, and wait."""
    return all((directory / f"flushed-{rank}").exists() for rank in range(RANKS))


def stored(directory: Path) -> dict[Path, Sequence[dict[str, Any]]]:
    """Return the rows on disk by file, in the order of ranks and starts."""
    return {path: rows_in(path) for path in find_runs(directory)}


def ended(job: Job, *, exit_code: int) -> str:
    """Wait for a job to end as expected. Return its output."""
    (process,) = job.processes
    output: str = process.communicate(timeout=240)[0]
    assert process.returncode == exit_code, output
    return output


def names(run: RecordedRun) -> set[str]:
    return {name for row in run.rows for name in row if name.endswith("loss")}


def steps(run: RecordedRun, name: str) -> list[int]:
    """Return the positions of a metric on the x axis, in the order of writers and their rows."""
    return sorted(row["global_step"] for row in run.rows if name in row)


def values(run: RecordedRun, name: str) -> list[float]:
    """Return the values of a metric in the order of their positions."""
    return [row[name] for row in sorted(run.rows, key=lambda row: row["global_step"]) if name in row]


BRANCHED = ("fork-auto", "fork-shared", "fork-new-rank-0", "fork-new-rank-1")
BRANCH = list(range(5, 10))  # positions of their rows


def test_rows_without_a_step_continue_at_the_branch_point_of_a_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = torchrun(branch, tmp_path)
    run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    for run_id in BRANCHED:
        assert steps(wandb_server.run(run_id), "loss") == BRANCH, run_id
    rows = wandb_server.run("parent-auto").rows
    assert [row["global_step"] for row in rows] == [row["_step"] for row in rows] == [*range(5), *BRANCH]
