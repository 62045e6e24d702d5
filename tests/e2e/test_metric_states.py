"""States of metrics in a job: their memory on ranks that compute nothing, and a rank that is late."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from history import history_of
from processes import run_job, torchrun
from stored import ended_runs

import dist_wandb

STATE = 16 * 2**20  # bytes
M_MMAP_THRESHOLD = -3


class Last(torchmetrics.CatMetric):
    def compute(self) -> torch.Tensor:
        """Return it."""
        return torch.as_tensor(super().compute())[-1]


def update(metric: Last, epoch: int) -> None:
    metric.reset()
    metric.update(torch.full((STATE // 4,), float(epoch)))


def peak() -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def log_states(directory: str) -> None:
    """Large metric states on three ranks, then metrics of a rank that is late; ranks 0 and 1 finish before it comes."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # otherwise it keeps much of what is freed
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = dist_wandb.init(project="metrics", dir=directory, limits=dist_wandb.Limits(heartbeat=0.3))
    run.log({"loss": 1.0}, step=0)
    run.flush(together=True)
    large = Last()
    update(large, 0)
    before = peak()
    for step in range(1, 5):
        update(large, step)
        run.log({"large": large}, step=step)
        run.flush(together=True)
    (Path(directory) / f"peak_{rank}").write_text(str((peak() - before) / STATE), encoding="utf-8")
    dist.barrier()
    if rank == 2:
        time.sleep(2.5)  # longer than a new name waits
    for step in range(5, 15):
        mean = torchmetrics.MeanMetric()
        mean.update(torch.full((rank + 1,), float(rank)))
        run.log({f"mean{step}": mean, f"number{step}": float(rank)}, step=step)
    run.finish()


def test_large_states_and_a_late_rank(tmp_path: Path) -> None:
    run_job(*torchrun(log_states, tmp_path, processes=3), cwd=tmp_path).check()
    (run,) = ended_runs(tmp_path, 1)
    history = history_of(run)
    assert history.last("large") == {step: float(step) for step in range(1, 5)}
    for rank in (1, 2):
        states = float((tmp_path / f"peak_{rank}").read_text(encoding="utf-8"))
        assert states < 2.5, "a copy of its own state, and pieces of it"
    for step in range(5, 15):
        assert history.final(f"number{step}") == [1.0]
        assert history.final(f"mean{step}") == [pytest.approx(8 / 6)], "corrected when the late rank had come"
