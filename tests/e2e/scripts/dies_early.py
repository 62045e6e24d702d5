"""Rank 0 opens no session, and a rank dies before another one writes: `dies_early.py DIRECTORY RANK JOIN FINISH`."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from history import STEPS
from processes import wait_until

import dist_wandb

ENOUGH = 3.0  # seconds, to learn who has opened a session; less if the ranks soon begin without rank 0


def main(directory: str, dies: str, join: str, finish: str) -> None:
    dist.init_process_group("gloo")
    rank, process = dist.get_rank(), Path(directory, "process")
    if rank == int(dies):
        process.write_text(str(os.getpid()))
    options: dict[str, Any] = {"limits": {"join_timeout": float(join), "finish_timeout": float(finish)}}
    options |= {"reinit": "create_new"}
    kinds: dict[str, dict[str, Any]] = {"combined": {}, "own": {"reduce": None}}
    runs = [
        dist_wandb.init("tests", id=kind, dir=str(Path(directory, kind)), **options, **of_kind)
        for kind, of_kind in kinds.items()
        if rank
    ]
    time.sleep(min(ENOUGH, float(join) / 6) if rank else 0.0)
    dist.barrier()
    if rank not in (0, int(dies)):
        wait_until(lambda: not Path("/proc", process.read_text()).exists(), within=20.0, what="the end of a rank")
        for step in range(STEPS):
            for run in runs:
                run.log({"loss": float(rank + step)})
        for run in runs:
            run.finish()
    sys.stdout.flush()
    os._exit(0)  # the process group cannot be left any more


if __name__ == "__main__":
    main(*sys.argv[1:])
