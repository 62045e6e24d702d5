"""A job of two ranks that is restarted once, in which rank 0 opens no session: `who_opens_again.py DIRECTORY`."""

import os
import sys
import time

import torch.distributed as dist
from history import STEPS
from processes import wait_until

import dist_wandb
from dist_wandb.job.launch import Launch

SOON = 40.0  # seconds, on a busy machine


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    attempt = Launch.detect().attempt or 0
    if dist.get_rank():
        run = dist_wandb.init("tests", dir=directory, limits={"join_timeout": 2.0})
        for step in range(attempt * STEPS, (attempt + 1) * STEPS):
            run.log({"loss": float(step)}, step=step)
        wait_until(lambda: bool(run.run), within=SOON, what="a run")
        run.flush()
        time.sleep(1.5)  # so long may a row be on its way to the disk
        if attempt:
            run.finish()
    dist.barrier()
    if not attempt:
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
