"""One rank of several nodes that logs into one run, which also has the hardware metrics of all nodes."""

import sys
import time

import torch.distributed as dist
import wandb
from stored import PATIENT

import dist_wandb


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    settings = wandb.Settings(x_stats_sampling_interval=1)
    with dist_wandb.init(
        "tests",
        id="exp",
        dir=directory,
        system_metrics="all-nodes",
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        settings=settings,
        config={"lr": 0.1},
    ) as run:
        assert bool(run.run) == (dist.get_rank() == 0)
        assert bool(wandb.run) == (dist.get_rank() == 0)
        for step in range(4):
            run.log({"loss": 2.0 * step + dist.get_rank()}, step=step)
            time.sleep(1)
        sys.stdout.write(f"hello from {dist.get_rank()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
