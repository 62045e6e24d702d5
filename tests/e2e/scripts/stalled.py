"""A job that stands still, or only validates for long: torchrun starts it with the name of the case."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

import dist_wandb

LIMIT = 4.0  # seconds
FAR = 600  # seconds: longer than any job of a test
LIMITS = {"heartbeat": 0.5, "peer_timeout": 5, "join_timeout": 30, "finish_timeout": 5}


def main(case: str, directory: str) -> None:
    """Train some steps, then do what the case does."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mode: Literal["online", "offline"] = "online" if "WANDB_BASE_URL" in os.environ else "offline"
    run = dist_wandb.init(mode=mode, dir=directory, stall_timeout=LIMIT, limits=LIMITS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(5):
        train(model)
        run.log({"loss": 0.5}, step=step)
    CASES[case](rank)
    train(model)
    run.finish()
    dist.destroy_process_group()


def train(model: Any) -> None:
    model(torch.ones(2, 2)).sum().backward()


def dataset(rank: int) -> None:
    if rank == 1:
        time.sleep(FAR)


def stop_rank(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def validation(rank: int) -> None:
    until = time.monotonic() + 1.6 * LIMIT  # it is told to be slow after three limits
    while rank == 0 and time.monotonic() < until:
        sum(range(10000))
    dist.barrier()


CASES: dict[str, Callable[[int], None]] = {one.__name__: one for one in (dataset, stop_rank, validation)}

if __name__ == "__main__":
    main(*sys.argv[1:])
