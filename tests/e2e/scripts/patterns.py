"""Two ranks, started as two nodes: decorated functions, and the examples.

Scenarios run one after the other, each with its own run id.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed as dist

import dist_wandb
from dist_wandb import get_run, wandb_init

RANK = int(os.environ["RANK"])
PROJECT = "tests"


def report(*words: object) -> None:
    sys.stdout.write("\n" + " ".join(map(str, ("SAW", *words))) + "\n")


def log_rows(first: int = 0, number: int = 3) -> None:
    for step in range(first, first + number):
        get_run().log({"loss": 2.0 * step + RANK}, step=step)


@wandb_init(project=PROJECT, id="before", run_mode="shared")
def called_before_the_process_group() -> None:
    log_rows(0, 2)
    dist.init_process_group("gloo")
    log_rows(2, 1)


@wandb_init
def inner() -> None:
    log_rows(1)


@wandb_init(project=PROJECT, id="nested")
def outer() -> None:
    run = get_run()
    report("nested", RANK, bool(run), bool(run.run), run.id)
    log_rows(0, 1)
    inner()
    assert get_run() is run


@wandb_init(project=PROJECT, id="raising", run_mode="shared")
def raising() -> None:
    log_rows()
    assert get_run().flush()
    if RANK == 1:
        get_run().log({"last words": 1.0}, step=3)
        raise ValueError("rank 1 fails")


@wandb_init(project=PROJECT, run_mode="auto", id="decorator")
def as_the_decorator_says() -> None:
    log_rows()
    with dist_wandb.init(id="explicit", run_mode="shared", reinit="create_new"):
        log_rows()
    with dist_wandb.init(id="inherited", reinit="create_new"):
        log_rows()


def decorated() -> None:
    called_before_the_process_group()
    outer()
    try:
        raising()
    except ValueError:
        report("raised", RANK)
    dist.barrier()
    os.environ["DIST_WANDB_RUN_MODE"] = "new"
    as_the_decorator_says()
    del os.environ["DIST_WANDB_RUN_MODE"]
    report("outside", RANK, bool(get_run()))


def main(directory: str, examples: str) -> None:
    decorated()
    for pattern in runpy.run_path(f"{examples}/who_writes.py")["PATTERNS"].values():
        pattern()
    loggers = runpy.run_path(f"{examples}/loggers.py")["WAYS"]
    loggers["torchtitan"]()
    runpy.run_path(f"{examples}/ray_train.py")["train"]({"lr": 0.5, "dir": directory})  # without Ray
    os.environ["DIST_WANDB_RUN_MODE"] = "shared"  # so that each rank's numbers are visible in addition to their mean
    for way in runpy.run_path(f"{examples}/parallel.py")["WAYS"].values():
        way(RANK, 2)
    del os.environ["DIST_WANDB_RUN_MODE"]
    loggers["torchtune"]()  # which opens a run on rank 0 alone: the last one of a job
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
