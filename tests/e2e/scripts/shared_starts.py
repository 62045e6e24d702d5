"""Starts a shared run of four ranks repeatedly. Everything is imported once; ranks are forks of this process."""

import os
import sys
import traceback
from datetime import timedelta

import torch.distributed as dist
import wandb  # noqa: F401  # before the forks: it is slow
from processes import free_port
from stored import PATIENT

import dist_wandb

RANKS, ROWS = 4, 5


def log(directory: str, number: int, rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    with dist_wandb.init(
        "tests", run_mode="shared", id=f"exp-{number}", dir=directory, limits=dist_wandb.Limits(heartbeat=PATIENT)
    ) as run:
        for step in range(ROWS):
            run.log({"loss": float(step + rank)}, step=step)
    dist.destroy_process_group()


def start(directory: str, number: int) -> None:
    meeting = f"tcp://127.0.0.1:{free_port()}"
    ranks = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                log(directory, number, rank, meeting)
            except BaseException:  # noqa: BLE001  # reported, and made an exit code
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ranks.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    sys.stdout.write(f"\nCODES {codes}\n")


if __name__ == "__main__":
    for number in range(int(sys.argv[2])):
        start(sys.argv[1], number)
