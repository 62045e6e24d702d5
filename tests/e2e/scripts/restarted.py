"""One rank of a job that is killed once after half its rows, and continues from there after a restart.

Its checkpoint is the number of rows that are safe. torchrun, or the test, restarts it.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from processes import wait_until
from stored import PATIENT

import dist_wandb
from dist_wandb.job.launch import Launch
from dist_wandb.settings.plan import RunMode

ROWS, KILLED_AT = 100, 50


def main(directory: str, run_mode: RunMode, resume: str, group: str) -> None:
    """Log rows without a step, different ones on each rank.

    `resume` is passed to `wandb.init` unless empty; `group` creates a process group first.
    """
    place = Path(directory)
    if group:
        dist.init_process_group("gloo")
    checkpoint = place / "checkpoint"
    begin = int(checkpoint.read_text()) if checkpoint.exists() else 0
    given: dict[str, Any] = {"resume": resume} if resume else {}
    run = dist_wandb.init(
        "tests",
        run_mode=run_mode,
        reduce="sum" if run_mode != "new" else None,
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        dir=directory,
        **given,
    )
    rank = run.topology.global_rank
    for row in range(begin, ROWS):
        run.log({"loss": row + 1000.0 * rank})
        if row == KILLED_AT - 1 and begin == 0:
            run.flush()
            (place / f"flushed-{rank}").touch()
            wait_until((place / "go-on").exists, 60, "the test, which has seen the rows")
            if rank == 0:
                checkpoint.write_text(str(KILLED_AT))
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the launcher ends this rank
    sys.stdout.write(f"ended {rank} {run.id} attempt {Launch.detect().attempt}\n")
    run.finish()
    if group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], cast(RunMode, sys.argv[2]), *sys.argv[3:])
