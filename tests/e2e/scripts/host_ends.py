"""Rank 0 hosts the job's store, opens no session, and ends before another rank writes: `host_ends.py DIRECTORY`."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from history import STEPS
from processes import wait_until

import dist_wandb

ENOUGH = 4.0  # seconds, to learn who has opened a session; much less than join_timeout


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank, host = dist.get_rank(), Path(directory, "host")
    if not rank:
        host.write_text(str(os.getpid()))
    kinds: dict[str, dict[str, Any]] = {"combined": {}, "own": {"reduce": None}}
    runs = [
        dist_wandb.init("tests", id=kind, dir=str(Path(directory, kind)), reinit="create_new", **options)
        for kind, options in kinds.items()
        if rank
    ]
    time.sleep(ENOUGH if rank else 0.0)
    dist.barrier()
    if rank:
        wait_until(lambda: not Path("/proc", host.read_text()).exists(), within=20.0, what="the end of rank 0")
    for step in range(STEPS):
        for run in runs:
            run.log({"loss": float(rank + step)})
    for run in runs:
        run.finish()
    sys.stdout.flush()
    os._exit(0)  # the process group cannot be left any more


if __name__ == "__main__":
    main(*sys.argv[1:])
