"""Plain PyTorch on two ranks, of which rank 1 sleeps long between two rows, but less than any limit.

It sleeps until rank 0 has logged all its rows, so these must not wait for it.
"""

import sys
import time
from pathlib import Path

import torch.distributed as dist
from history import STEPS
from processes import wait_until

import dist_wandb


def main(directory: str, seconds: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    is_through = Path(directory) / "is-through"
    with dist_wandb.init("tests", id="exp", dir=directory, limits=dist_wandb.Limits(peer_timeout=60)) as run:
        run.log({"loss": float(rank)}, step=0)
        assert run.flush(timeout=20)
        dist.barrier()
        if rank == 1:
            time.sleep(float(seconds))
            wait_until(is_through.exists, within=30, what="the end of rank 0's loop")
        for step in range(1, STEPS):
            run.log({"loss": 2.0 * step + rank, f"own_{rank}": 1.0}, step=step)
        if rank == 0:
            is_through.touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
