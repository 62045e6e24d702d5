"""Ranks that hold parts of the model: the mean is taken over the replicas, with one rank of each in the unit.

torchrun --nproc_per_node 4 meshes.py tensor    # FSDP2 over 2 replicas, each split in 2 by tensor parallelism
torchrun --nproc_per_node 4 meshes.py pipeline  # 2 replicas, each in 2 stages; only the last stage has the loss
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from digits import load_batches, make_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dist_wandb

PARTS = 2  # of each replica
MICROBATCHES = 4


def tensor(world_size: int) -> None:
    """All ranks of a replica have the same loss, so one of them is enough. Rank 0 is in the unit and writes the run."""
    mesh = init_device_mesh("cpu", (world_size // PARTS, PARTS), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(make_model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with dist_wandb.init("digits", name="tensor", unit=mesh["dp"]) as run:
        for step, (images, labels) in enumerate(load_batches(mesh["dp"].get_local_rank(), mesh["dp"].size())):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss}, step=step, weight=len(labels))


def pipeline(world_size: int) -> None:
    """The last rank is in the last stage, which has the loss: it is the primary, and its stage is the unit."""
    mesh = init_device_mesh("cpu", (PARTS, world_size // PARTS), mesh_dim_names=("pp", "dp"))
    number, is_last = mesh["pp"].get_local_rank(), mesh["pp"].get_local_rank() == PARTS - 1
    first, activation, last = make_model()
    part = nn.Sequential(first, activation) if number == 0 else last
    stage = PipelineStage(part, number, PARTS, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    replicas = mesh["dp"].get_group()
    with dist_wandb.init("digits", name="pipeline", unit=mesh["dp"], primary_rank=-1) as run:
        for step, (images, labels) in enumerate(load_batches(mesh["dp"].get_local_rank(), mesh["dp"].size())):
            if len(labels) % MICROBATCHES:
                continue
            losses: list[torch.Tensor] = []
            schedule.step(*(() if number else (images,)), target=labels if is_last else None, losses=losses)
            for parameter in part.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=replicas)
                parameter.grad /= mesh["dp"].size()
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": torch.stack(losses).mean()} if is_last else {}, step=step)


WAYS = {"tensor": tensor, "pipeline": pipeline}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("ways", nargs="+", choices=WAYS)
    ways = parser.parse_args().ways
    dist.init_process_group("gloo")
    for way in ways:
        WAYS[way](dist.get_world_size())
    dist.destroy_process_group()
