"""Large metric states on three ranks, then metrics of a rank that is late; ranks 0 and 1 finish before it comes."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics

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


ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)  # otherwise it keeps much of what is freed
dist.init_process_group("gloo")
rank = dist.get_rank()
run = dist_wandb.init(project="metrics", dir=sys.argv[1], limits=dist_wandb.Limits(heartbeat=0.3))
run.log({"loss": 1.0}, step=0)
run.flush(together=True)
large = Last()
update(large, 0)
before = peak()
for step in range(1, 5):
    update(large, step)
    run.log({"large": large}, step=step)
    run.flush(together=True)
(Path(sys.argv[1]) / f"peak_{rank}").write_text(str((peak() - before) / STATE), encoding="utf-8")
dist.barrier()
if rank == 2:
    time.sleep(2.5)  # longer than a new name waits
for step in range(5, 15):
    mean = torchmetrics.MeanMetric()
    mean.update(torch.full((rank + 1,), float(rank)))
    run.log({f"mean{step}": mean, f"number{step}": float(rank)}, step=step)
run.finish()
