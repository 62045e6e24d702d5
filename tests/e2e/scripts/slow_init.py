"""Two ranks that log into one run, whose server does not answer: `slow_init.py DIRECTORY`."""

import sys

import torch.distributed as dist
import wandb
from history import STEPS

import dist_wandb

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, limits = dist.get_rank(), {"join_timeout": 2.0, "finish_timeout": 3.0}
    settings = wandb.Settings(init_timeout=5)
    run = dist_wandb.init("tests", id="exp", dir=sys.argv[1], limits=limits, settings=settings)
    for step in range(STEPS):
        run.log({"loss": 2.0 * step + rank}, step=step)
    run.finish()
