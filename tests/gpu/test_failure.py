"""A device that fails in the middle of a job: a CUDA device with `make test-gpu`, else a stand-in for it."""

from __future__ import annotations

import sys
from pathlib import Path

import devices
import pytest
from processes import python, run_job, torchrun
from stored import ended_runs, read_history

import dist_wandb

ROWS = 20


def log_until_it_fails(kind: str, directory: str) -> None:
    """A rank logs rows, then its device fails. Arguments: the kind of device, and the directory."""
    with devices.used(kind) as device:
        session = dist_wandb.init(project="gpu", dir=directory)
        for step in range(ROWS):
            session.log({"loss": device.tensor(step)}, step=step)
        assert session.flush()
        device.work(0.5)
        cell = dist_wandb.gathered([[device.tensor(1).expand(2)]], ["cell"])
        session.log({"loss": device.tensor(ROWS), "table": cell}, step=ROWS)  # may be lost with the device
        device.fail()
        for step in range(ROWS + 1, ROWS + 1000):
            session.log({"loss": device.tensor(step)}, step=step)
            device.tensor(step).item()
        sys.stdout.write("the device has not failed\n")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_run_ends_as_failed_and_keeps_its_rows(kind: str, ranks: int, tmp_path: Path) -> None:
    start = python if ranks == 1 else torchrun
    job = run_job(*start(log_until_it_fails, kind, tmp_path), cwd=tmp_path, timeout=120)
    assert job.exit_codes == (1,), job.output
    assert "the device has not failed" not in job.output
    assert not job.lines("dist_wandb: the exchange"), job.output
    assert not job.lines("dist_wandb: the last rows of rank 0 could not"), job.output
    (run,) = ended_runs(tmp_path, 1)
    assert run.state == "failed", job.output
    steps = [row["loss"] for row in read_history(run.path) if "loss" in row]
    assert steps[:20] == list(range(20)), job.output
