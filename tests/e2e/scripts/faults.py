"""One rank that trains for a while despite failures of W&B. It creates files as it progresses, and waits for others."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wandb

import dist_wandb

ROWS = 40


def main(directory: str, pace: str, finish: str, waits_for: str = "") -> None:
    """Train; `finish` is the limit for the other ranks and for the upload, `waits_for` a file."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    begun = time.monotonic()
    limits: dict[str, Any] = {"peer_timeout": 20.0, "finish_timeout": float(finish), "heartbeat": 0.2}
    own = {"join_timeout": 2.0} if "INNER" in os.environ else {}
    with dist_wandb.init("tests", id="exp", dir=directory, limits={**limits, **own}) as run:
        inner = (
            dist_wandb.init("tests", id="exp-inner", dir=directory, limits=limits, reinit="create_new")
            if os.environ.get("INNER")
            else None
        )
        sys.stdout.write(f"OPENED {rank} after {time.monotonic() - begun:.1f} s\n")
        for step in range(ROWS):
            gradient = torch.ones(2)
            dist.all_reduce(gradient)  # the training
            assert gradient.tolist() == [2.0, 2.0]
            table = (
                {"table": wandb.Table(["step"], [[step]])} if step == ROWS // 2 + 5 and "TABLE" in os.environ else {}
            )
            run.log({"loss": 2.0 * step + rank, **table}, step=step)
            if inner is not None:
                inner.log({"inner": 2.0 * step + rank}, step=step)
            time.sleep(float(pace))
            if step == ROWS // 2:
                run.flush()
                mark = Path(f"begun-{rank}")
                mark.write_text(str(os.getpid()))
                mark.rename(f"half-{rank}")  # so that no partial file is read
                while waits_for and not Path(waits_for).exists():
                    time.sleep(0.05)
                second_half = time.monotonic()
        if inner is not None:
            inner.finish()
        run.flush(timeout=30)
        dist.barrier()  # no rank is late to the end: the limits are those of the upload
        sys.stdout.write(f"TRAINED {rank} in {time.monotonic() - second_half:.1f} s\n")
        ended = time.monotonic()
    sys.stdout.write(f"\nFINISHED {rank} after {time.monotonic() - ended:.1f} s\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
