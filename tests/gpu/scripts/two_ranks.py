"""Ranks on one device log to one run. Arguments: the backend of the job's group, and the directory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchmetrics
from devices import Cuda

import dist_wandb

ROWS = 30


def main(backend: str, directory: Path) -> None:
    device = Cuda()
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    session = dist_wandb.init(project="gpu", dir=directory)
    metric = torchmetrics.MeanMetric().to("cuda")
    gradient = torch.ones(1000, device="cuda")
    # NCCL refuses two ranks on one device at their first collective: then only dist_wandb's group communicates
    trains_together = backend == "gloo" or world_size == 1
    for step in range(ROWS):
        gradient.fill_(rank + 1.0)
        if trains_together:
            dist.all_reduce(gradient)
        device.work(0.01)
        metric.update(torch.full((2,), float(rank + step), device="cuda"))
        row = {"loss": device.tensor(rank + step, torch.bfloat16), "gradient": gradient[0], "metric": metric}
        if step == ROWS - 1:
            row["table"] = dist_wandb.gathered([[device.tensor(rank).expand(2)]], ["cell"])
        with device.no_waiting(), session.timed("logging"):
            session.log(row, step=step, weight=device.tensor(1 + 2 * rank))
        metric.reset()
    torch.cuda.set_sync_debug_mode("error")  # of all threads of the process
    session.finish()
    torch.cuda.set_sync_debug_mode("default")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
