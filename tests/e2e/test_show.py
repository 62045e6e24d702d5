"""Real offline runs of wandb, read back: finished, running and killed."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from processes import run_job, started, wait_until
from stored import ended_runs, find_runs, read_history, read_run, rows_in

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


def command(code: str, directory: Path) -> list[str | Path]:
    return [sys.executable, "-c", PRELUDE + code, directory]


def test_a_finished_run_and_its_history_are_read_completely(tmp_path: Path) -> None:
    run_job(command(ENDING, tmp_path), cwd=tmp_path, timeout=120).check()
    (run,) = ended_runs(tmp_path, 1)
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


def test_a_killed_run_is_unfinished_before_and_after(tmp_path: Path) -> None:
    with started(command(ENDLESS, tmp_path), cwd=tmp_path) as job:
        wait_until(lambda: [len(rows_in(path)) for path in find_runs(tmp_path)] == [50], 60)
        (path,) = find_runs(tmp_path)
        before = read_run(path)
        job.kill()
        job.wait(60)
        after = read_run(path)
    assert (before.state, after.state) == ("unfinished", "unfinished")
    assert (after.rows, after.exit_code, after.metrics["loss"].last) == (50, None, 49)
