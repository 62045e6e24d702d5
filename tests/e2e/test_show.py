"""Real offline runs of wandb, read back: finished, running and killed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stored import find_runs, read_files, read_run

from dist_wandb.wandb_files.reading import StoredRun, read_history

PRELUDE = """
import sys, wandb
def start(run_id, **more):
    settings = wandb.Settings(silent=True, x_disable_stats=True, x_transaction_log_flush_interval=0.1)
    return wandb.init(project="digits", id=run_id, mode="offline", dir=sys.argv[1], settings=settings, **more)
"""
ENDING = """
run = start("good", name="baseline", group="sweep", job_type="train", tags=["t"], config={"lr": 0.1, "net": {"h": 3}})
for step in range(300):
    row = {"loss": 1 / (step + 1), "val": {"acc": step / 300}, "text": "a", "flag": True, "big": 10**18}
    run.log(row | {"odd": float("nan") if step % 2 else float("inf"), "hist": wandb.Histogram([1, 2, 3])})
run.config.update({"late": [1, 2]})
run.name = "renamed"
run.finish()
"""
ENDLESS = """
import time
run = start("killed")
for step in range(50):
    run.log({"loss": float(step)})
time.sleep(600)
"""


def script(code: str, directory: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.Popen([sys.executable, "-c", PRELUDE + code, str(directory)], env=environment)


def poll(directory: Path, run_id: str, until: Callable[[StoredRun], bool], seconds: float = 60) -> StoredRun:
    """Read a run until it has the expected content: wandb writes in the background."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        runs, _ = read_files(find_runs(directory))
        for run in runs:
            if run.run_id == run_id and until(run):
                return run
        time.sleep(0.1)
    pytest.fail(f"run {run_id} did not come to hold what it must within {seconds} s")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    process = script(ENDLESS, tmp_path)
    yield process, tmp_path
    process.kill()
    process.wait()


def test_a_finished_run_and_its_history_are_read_completely(tmp_path: Path) -> None:
    assert script(ENDING, tmp_path).wait(timeout=120) == 0
    run = poll(tmp_path, "good", lambda run: run.exit_code is not None)
    assert (run.run_id, run.name, run.project, run.group, run.job_type, run.tags) == (
        "good",
        "renamed",
        "digits",
        "sweep",
        "train",
        ("t",),
    )
    assert (run.state, run.rows, run.problems, run.sidecar) == ("finished", 300, (), None)
    assert run.config == {"lr": 0.1, "net": {"h": 3}, "late": [1, 2]}
    assert list(run.metrics) == ["big", "loss", "odd", "val.acc"]
    loss, odd = run.metrics["loss"], run.metrics["odd"]
    assert (loss.count, loss.last, loss.smallest, loss.largest) == (300, 1 / 300, 1 / 300, 1)
    assert run.metrics["big"].last == 10**18
    assert (odd.count, odd.not_finite, odd.smallest) == (300, 300, math.inf)
    assert math.isnan(odd.last)
    rows = read_history(run.path)
    assert [row["_step"] for row in rows] == list(range(300))
    assert [row["loss"] for row in rows] == [1 / (step + 1) for step in range(300)]
    assert (rows[0]["val.acc"], rows[0]["text"], rows[0]["flag"], rows[0]["odd"]) == (0, "a", True, math.inf)
    assert math.isnan(rows[1]["odd"])


def test_a_killed_run_is_unfinished_before_and_after(
    running: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, directory = running
    before = poll(directory, "killed", lambda run: run.rows == 50)
    process.kill()
    process.wait()
    after = read_run(before.path)
    assert (before.state, after.state) == ("unfinished", "unfinished")
    assert (after.rows, after.exit_code, after.metrics["loss"].last) == (50, None, 49)
