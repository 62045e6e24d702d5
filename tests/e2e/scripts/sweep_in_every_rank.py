"""Two ranks that call `wandb.agent`, each for itself."""

import os
import sys

import torch.distributed as dist

import dist_wandb as wandb

dist.init_process_group("gloo")
rank = dist.get_rank()


def trial() -> None:
    with wandb.init(project="digits") as run:
        run.log({"loss": run.config["lr"] + rank})


sweep = {"method": "grid", "parameters": {"lr": {"values": [0.5, 0.25]}}}
box = [wandb.sweep(sweep, project="digits") if rank == 0 else None]
dist.broadcast_object_list(box)
try:
    wandb.agent(str(box[0]), trial, count=2, project="digits")
except wandb.errors.ConfigurationError as error:
    sys.stdout.write(f"\nREFUSED {error}\n")
dist.barrier()
os._exit(0)
