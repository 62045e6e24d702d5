"""Two sessions one after the other; W&B takes long to end the first run on rank 0: `ends_slowly.py DIRECTORY`."""

import sys
import time
from typing import Any

import torch.distributed as dist
import wandb

import dist_wandb

LONG = 4.0  # seconds; a rank that ends its session waits less for ranks that have not opened it


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank, finish = dist.get_rank(), wandb.Run.finish

    def finish_slowly(run: wandb.Run, *args: Any, **kwargs: Any) -> None:
        time.sleep(LONG)
        finish(run, *args, **kwargs)

    if rank == 0:
        wandb.Run.finish = finish_slowly  # type: ignore[method-assign]
    for number in range(2):
        with dist_wandb.init("tests", id=f"exp-{number}", dir=directory, mode="offline") as run:
            run.log({"loss": float(rank)}, step=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
