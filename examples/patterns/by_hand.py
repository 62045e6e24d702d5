"""Without torchrun and without DistributedDataParallel: `mp.spawn` starts the ranks, hooks average the gradients.

python by_hand.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from digits import load_batches, make_model
from torch import nn

import dist_wandb

WORLD_SIZE = 2


def main(rank: int, meeting_place: str) -> None:
    dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=WORLD_SIZE)
    train(lr=0.5)  # opens its run here, where the ranks are known
    dist.destroy_process_group()


@dist_wandb.wandb_init(project="digits", name="by-hand")
def train(lr: float) -> None:
    model = make_model()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average_gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for step, (images, labels) in enumerate(load_batches(dist.get_rank(), WORLD_SIZE)):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist_wandb.get_run().log({"loss": loss}, step=step)


def average_gradient(parameter: torch.Tensor) -> None:
    """Called in `backward` as soon as the gradient of a parameter is complete, in the same order on all ranks."""
    dist.all_reduce(parameter.grad)
    parameter.grad /= WORLD_SIZE


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(main, args=((Path(directory) / "store").as_uri(),), nprocs=WORLD_SIZE)
