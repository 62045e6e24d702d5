"""One rank that logs and ends without `finish`."""

import sys

import torch.distributed as dist
from history import STEPS

import dist_wandb


def main(directory: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = dist_wandb.init("tests", id="exp", dir=directory)
    for step in range(STEPS):
        run.log({"loss": 2.0 * step + rank}, step=step)
    dist.barrier()
    if kind == "destroyed":
        dist.destroy_process_group()
    if kind == "sys_exit":
        sys.exit(3)
    if kind == "exception":
        raise RuntimeError("training failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
