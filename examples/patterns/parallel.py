"""Other ways to train in parallel with torch. `log` is the same in all of them, and never waits for other ranks.

torchrun --nproc_per_node 2 parallel.py fsdp2        # parameters sharded over the ranks
torchrun --nproc_per_node 2 parallel.py join         # ranks with different numbers of batches
torchrun --nproc_per_node 2 parallel.py accumulate   # one optimizer step for several batches
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from digits import load_batches, make_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dist_wandb

ACCUMULATED = 4


def fsdp2(rank: int, world_size: int) -> None:
    """Convert a DTensor into a plain tensor before it is logged, on all ranks: `full_tensor` is a collective."""
    model = make_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dist_wandb.init("digits", name="fsdp2") as run:
        for step, (images, labels) in enumerate(load_batches(rank, world_size)):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
            optimizer.step()
            run.log({"loss": loss, "gradient_norm": norm}, step=step)


def join(rank: int, world_size: int) -> None:
    """In steps for which only some ranks have a batch, the row is the mean over those ranks."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = load_batches(rank, world_size)
    with dist_wandb.init("digits", name="join") as run, model.join():
        for step, (images, labels) in enumerate(batches[5 * rank :]):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss}, step=step, weight=len(labels))


def accumulate(rank: int, world_size: int) -> None:
    """One row per optimizer step: the mean over the samples of its batches on all ranks."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = load_batches(rank, world_size)
    with dist_wandb.init("digits", name="accumulate") as run:
        for step, begin in enumerate(range(0, len(batches), ACCUMULATED)):
            together = batches[begin : begin + ACCUMULATED]
            samples, total = sum(len(labels) for _, labels in together), 0.0
            for images, labels in together:
                is_last = labels is together[-1][1]
                with nullcontext() if is_last else model.no_sync():
                    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum") / samples
                    loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": total}, step=step, weight=samples)


WAYS = {"fsdp2": fsdp2, "join": join, "accumulate": accumulate}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=WAYS)
    ways = parser.parse_args().ways
    dist.init_process_group("gloo")
    for way in ways:
        WAYS[way](dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
