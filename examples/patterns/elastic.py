"""A job that fails and is restarted by torchrun or SLURM continues from its checkpoint, in the same run.

    torchrun --standalone --nproc_per_node 2 --max-restarts 1 elastic.py --fail-in 2
    sbatch elastic.sbatch --fail-in 2

With gloo, as here, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it, process groups of torch 2.13 may fail to start
again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from digits import load_batches, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist_wandb


def train(epochs: int, fail_in: int | None, checkpoint: Path) -> None:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        begin = saved["epoch"] + 1

    batches = load_batches(dist.get_rank(), dist.get_world_size())
    with dist_wandb.init("digits", name="elastic") as run:  # a restart continues the run of the first start
        for epoch in range(begin, epochs):
            for index, (images, labels) in enumerate(batches):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log({"loss": loss, "epoch": epoch}, step=epoch * len(batches) + index)
            run.flush()  # the rows that the checkpoint covers reach W&B before it is saved
            if dist.get_rank() == 0:
                torch.save({"model": model.state_dict(), "epoch": epoch}, checkpoint)
            if epoch == fail_in and is_first_start():
                raise RuntimeError(f"rank {dist.get_rank()} fails after epoch {epoch}, because of --fail-in")


def is_first_start() -> bool:
    return {os.environ.get(f"{by}_RESTART_COUNT", "0") for by in ("TORCHELASTIC", "SLURM")} == {"0"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--fail-in", type=int, help="epoch after which the first start fails")
    parser.add_argument("--checkpoint", type=Path, default="elastic.pt")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.epochs, args.fail_in, args.checkpoint)
    dist.barrier()
    dist.destroy_process_group()
