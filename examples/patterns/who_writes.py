"""Which ranks open a run and write into it: the usual patterns, one function each.

    torchrun --nproc_per_node 2 who_writes.py rank-0
    WANDB_RUN_GROUP=night torchrun --nproc_per_node 2 who_writes.py group

On two machines, run the same command on both, with --node-rank 0 on the first and 1 on the second:

    torchrun --nnodes 2 --nproc_per_node 2 --master-addr FIRST --node-rank 0 who_writes.py node
"""

from __future__ import annotations

import argparse

import torch.distributed as dist
from digits import train

import dist_wandb


def mean_of_all_ranks() -> None:
    """One run, in which each number is the mean over the ranks. This is the default."""
    with dist_wandb.init("digits", name="mean") as run:
        for step, loss in train():
            run.log({"loss": loss}, step=step)


def rank_0_only() -> None:
    """One run with rank 0's own numbers: a script that guards its wandb calls does not have to change."""
    with dist_wandb.init("digits", name="rank-0", reduce=None) as run:
        for step, loss in train():
            if dist.get_rank() == 0:
                run.log({"loss": loss}, step=step)


def curves_of_ranks() -> None:
    """One run with one writer: the mean, its spread over ranks, and a curve for each rank."""
    with dist_wandb.init("digits", name="curves", spread=["loss"]) as run:
        for step, loss in train():
            run.log({"loss": loss, f"rank-{dist.get_rank()}/loss": loss}, step=step)


def run_of_all_ranks() -> None:
    """One run that all ranks write into, with their console and hardware (W&B's shared mode)."""
    with dist_wandb.init("digits", name="shared", run_mode="shared") as run:
        for step, loss in train():
            run.log({"loss": loss}, step=step)


def run_for_each_rank() -> None:
    """A run for each rank, in one group: WANDB_RUN_GROUP, group=..., or a generated one."""
    with dist_wandb.init("digits", name="group", run_mode="new") as run:
        for step, loss in train():
            run.log({"loss": loss}, step=step)


def run_for_each_node() -> None:
    """A run for each node, in which each number is the mean over the ranks of the node."""
    with dist_wandb.init("digits", name="node", rank_scope="worker") as run:
        for step, loss in train():
            run.log({"loss": loss}, step=step)


PATTERNS = {
    "mean": mean_of_all_ranks,
    "rank-0": rank_0_only,
    "curves": curves_of_ranks,
    "shared": run_of_all_ranks,
    "group": run_for_each_rank,
    "node": run_for_each_node,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("patterns", nargs="+", choices=PATTERNS)
    patterns = parser.parse_args().patterns
    dist.init_process_group("gloo")
    for pattern in patterns:
        PATTERNS[pattern]()
    dist.destroy_process_group()
