"""An agent of a sweep in every rank: ``function``, by `wandb.agent`; ``program``, by agents that set variables."""

import os
import sys

import torch.distributed as dist

import dist_wandb as wandb

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()


def trial() -> None:
    with wandb.init(project="digits") as run:
        run.log({"loss": run.config["lr"] + rank})


try:
    if how == "function":
        sweep = {"method": "grid", "parameters": {"lr": {"values": [0.5, 0.25]}}}
        box = [wandb.sweep(sweep, project="digits") if rank == 0 else None]
        dist.broadcast_object_list(box)
        wandb.agent(str(box[0]), trial, count=2, project="digits")
    else:
        os.environ.update(WANDB_MODE="offline", WANDB_SWEEP_ID="sweep", WANDB_RUN_ID=f"trial-{rank}")
        wandb.init(project="digits")
except wandb.errors.ConfigurationError as error:
    sys.stdout.write(f"\nREFUSED {error}\n")
dist.barrier()
os._exit(0)
