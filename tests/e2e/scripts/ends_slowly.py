"""Sessions one after the other; W&B takes long to end a rank's first run: `ends_slowly.py DIRECTORY MODE RANK LOG ...`.

In each of them something is logged (`LOG` is 1), or nothing (0), so that another rank is soon at the next one.
"""

import sys
import time
from typing import Any

import torch.distributed as dist
import wandb

import dist_wandb

LONG = 7.0  # seconds; a rank that ends its session waits less for ranks that have not opened it


def main(directory: str, mode: Any, slow: str, *logged: str) -> None:
    dist.init_process_group("gloo")
    rank, finish = dist.get_rank(), wandb.Run.finish

    def finish_slowly(run: wandb.Run, *args: Any, **kwargs: Any) -> None:
        time.sleep(LONG * ("exp-0" in str(run.id)))
        finish(run, *args, **kwargs)

    if rank == int(slow):
        wandb.Run.finish = finish_slowly  # type: ignore[method-assign]
    for number, is_logged in enumerate(map(int, logged)):
        options: Any = {"run_mode": mode, "reduce": "mean", "dir": directory, "mode": "offline"}
        with dist_wandb.init("tests", id=f"exp-{number}", **options) as run:
            if is_logged:
                run.log({"loss": float(rank)}, step=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
