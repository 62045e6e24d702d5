"""Runs that are forked and rewound by all ranks of a job, and then resumed, in every run mode; rows without a step."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

import dist_wandb
from dist_wandb.settings.plan import RUN_MODES

PARENT, BRANCH, RESUMED = 8, 3, 2  # rows


def log(directory: str, run_mode: Any, rows: int, **given: Any) -> None:
    reduce: Any = None if run_mode == "new" else "mean"
    run = dist_wandb.init("tests", dir=directory, run_mode=run_mode, reduce=reduce, **given)
    dist.barrier()
    for row in range(rows):
        run.log({"loss": float(row)})
        run.flush(together=True)
    run.finish()
    dist.barrier()


def main(directory: str) -> None:
    """Branch each run after its step 4."""
    dist.init_process_group("gloo")
    for mode in RUN_MODES:
        parent = f"parent-{mode}"
        log(directory, mode, PARENT, id=parent)
        at = f"{parent}-rank-0?_step=4" if mode == "new" else f"{parent}?_step=4"
        log(directory, mode, BRANCH, id=f"fork-{mode}", fork_from=at)
        log(directory, mode, RESUMED, id=f"fork-{mode}", resume="allow")
        if mode == "auto":
            log(directory, mode, BRANCH, resume_from=at)
            log(directory, mode, RESUMED, id=parent, resume="allow")
    dist.destroy_process_group()


main(*sys.argv[1:])
