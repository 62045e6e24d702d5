"""Which rank holds all others up? One rank stops reading its data, and the others say so after some seconds.

    torchrun --nproc_per_node 2 stalled.py

The message comes about eight seconds after the limit of ten; `on_stall` then ends the job, which dist_wandb never does.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dist_wandb

STANDS_STILL = 20  # the step at which rank 1 does


def read_batch(rank: int, step: int) -> torch.Tensor:
    if rank == 1 and step == STANDS_STILL:
        time.sleep(3600)  # such as a file on a server that does not answer
    return torch.ones(8, 4)


def end_job(stall: object) -> None:
    print(f"The job stands still: {stall}", flush=True)
    os._exit(1)  # torchrun then ends the other ranks


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    with dist_wandb.init("stalled", mode="offline", dir="runs", stall_timeout=10, on_stall=end_job) as run:
        for step in range(100):
            loss = model(read_batch(rank, step)).square().mean()
            loss.backward()
            run.log({"loss": loss.item()}, step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
