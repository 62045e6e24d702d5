"""One rank that trains for a while, whatever happens to W&B; it makes files as it gets on, and waits for others."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dist_wandb

ROWS = 40


def main(directory: str, pace: str, waits_for: str = "") -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    begun = time.monotonic()
    with dist_wandb.init("tests", id="exp", dir=directory, peer_timeout=4.0, finish_timeout=6.0, heartbeat=0.2) as run:
        sys.stdout.write(f"OPENED {rank} after {time.monotonic() - begun:.1f} s\n")
        for step in range(ROWS):
            gradient = torch.ones(2)
            dist.all_reduce(gradient)  # the training
            assert gradient.tolist() == [2.0, 2.0]
            run.log({"loss": 2.0 * step + rank}, step=step)
            time.sleep(float(pace))
            if step == ROWS // 2:
                run.flush()
                Path(f"half-{rank}").write_text(str(os.getpid()))
                while waits_for and not Path(waits_for).exists():
                    time.sleep(0.05)
        Path(f"trained-{rank}").touch()
        sys.stdout.write(f"TRAINED {rank}\n")
        ended = time.monotonic()
    sys.stdout.write(f"FINISHED {rank} after {time.monotonic() - ended:.1f} s\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
