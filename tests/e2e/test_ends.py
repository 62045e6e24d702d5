"""How jobs end, online: the order of writers, one completion, and the exit code of the first failure.

For a rank that raises, after which its launcher ends the others, see the last case of `tests/contract`.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch.distributed as dist
from history import STEPS, history
from processes import Finished, python, rank_commands, run_job, started
from wandb.sdk.lib.run_stopping import RunStopChecker
from wandb_records import RecordedRun
from wandb_server import WandbServer

import dist_wandb
from dist_wandb.settings.plan import RUN_MODES, check_choice

ROWS = {step: 2.0 * step + 0.5 for step in range(5)}


def log_at_signals(directory: str) -> None:
    """A process whose own signal handler logs a thousand times a second, also while SIGTERM ends its run."""
    run = dist_wandb.init("tests", id="exp", dir=directory)

    def handle(_number: int, _frame: FrameType | None) -> None:
        run.log({"tick": 1.0})

    for step in range(STEPS):
        run.log({"loss": float(step)})
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def log_on(run: dist_wandb.Session) -> None:
    """Log until three seconds after the other rank was stopped."""
    until = math.inf
    while time.monotonic() < until:
        run.log({"own-1": 1.0})
        time.sleep(0.1)
        if Path("stopped").exists():
            until = min(until, time.monotonic() + 3.0)


def end(how: str, run: dist_wandb.Session) -> None:
    if how == "raises":
        raise RuntimeError("training failed")
    if how == "exits with 3":
        sys.exit(3)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "is stopped":  # by W&B, which interrupts the end_as_told thread
        try:
            time.sleep(120)
        finally:
            Path("stopped").touch()
    if how == "logs on":
        log_on(run)
    if how == "is late":
        time.sleep(1.5)
    if how == "destroys the group":
        dist.destroy_process_group()


def end_as_told(directory: str, run_mode: str, *ends: str) -> None:
    """Each rank ends as given in `ends`; with " at last" in it, it never calls `finish`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it as ignored
    checker: Any = RunStopChecker.__init__
    checker.__kwdefaults__["poll_interval"] = 0.5  # seconds, of 15
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    how, at_last, _ = ends[rank].partition(" at last")
    run = dist_wandb.init(
        "tests",
        run_mode=check_choice("run_mode", run_mode, RUN_MODES),
        id="exp",
        dir=directory,
        limits=dist_wandb.Limits(peer_timeout=20.0, finish_timeout=25.0, heartbeat=0.2),
    )
    for step in range(5):
        run.log({"loss": 2.0 * step + rank}, step=step)
    run.flush()
    dist.barrier()
    with contextlib.nullcontext() if at_last else run:
        end(how, run)
        run.log({f"own-{rank}": 1.0}, step=5)


def recorded(server: WandbServer, tmp_path: Path, run_mode: str, *ends: str) -> tuple[RecordedRun, Finished]:
    """Return the run of two ranks without a launcher, which is stopped on W&B's page if one of them awaits it."""
    commands = rank_commands(end_as_told, tmp_path, run_mode, *ends, world_size=2)
    with started(*commands, cwd=tmp_path, environment=server.environment(tmp_path)) as job:
        if ends[0].startswith("is stopped"):
            server.wait_until(lambda: bool(server.runs) and loss(server.run("exp")) == ROWS, within=120)
            server.stopped_runs.add("exp")
        finished = job.wait(240)
    return server.run("exp"), finished


def loss(run: RecordedRun) -> dict[int, float]:
    return {row["global_step"]: row["loss"] for row in run.rows if "loss" in row}


@pytest.mark.parametrize(
    ("run_mode", "ends", "code", "codes"),
    [
        ("shared", ("destroys the group at last", "is late at last"), 0, (0, 0)),
        ("shared", ("ends", "is killed"), 1, (0, -signal.SIGKILL)),
        ("auto", ("ends at last", "raises at last"), 1, (0, 1)),
        pytest.param(*("auto", ("ends at last", "exits with 3 at last"), 3, (0, 3)), marks=pytest.mark.cold),
        ("auto", ("is stopped at last", "logs on"), 255, (-signal.SIGINT, 0)),
        ("auto", ("is terminated", "ends"), 143, (-signal.SIGTERM, 0)),
    ],
)
def test_a_run_ends_once_with_the_first_failure(  # a table
    wandb_server: WandbServer,
    tmp_path: Path,
    run_mode: str,
    ends: tuple[str, str],
    code: int,
    codes: tuple[int, int],
) -> None:
    run, finished = recorded(wandb_server, tmp_path, run_mode, *ends)
    assert finished.exit_codes == codes
    assert "Lost rank" not in finished.output or -signal.SIGKILL in codes
    if ends[1] == "logs on":  # until rank 0 is gone, and with it the store
        assert re.search("Rank 0 failed after step|Rank 1 cannot reach the store", finished.output)
    assert (run.completions, run.exit_codes) == (1, [code])
    assert loss(run) == ROWS
    if ends[1].startswith("is late"):
        assert [row["rank-1/own-1"] for row in run.rows if "rank-1/own-1" in row] == [1.0]


def test_a_signal_handler_may_log_while_sigterm_ends_the_run(tmp_path: Path) -> None:
    finished = run_job(*python(log_at_signals, tmp_path), cwd=tmp_path, timeout=60)
    assert finished.exit_codes == (-signal.SIGTERM,)
    assert "Traceback" not in finished.output
    assert history(tmp_path).values("loss") == list(range(STEPS))
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [143]
