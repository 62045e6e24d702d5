"""Plain PyTorch on two ranks, of which rank 1 sleeps long between two rows; no limit has been reached by then."""

import sys
import time
from pathlib import Path

import torch.distributed as dist
from history import STEPS

import dist_wandb


def main(directory: str, seconds: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with dist_wandb.init("tests", id="exp", dir=str(Path(directory)), peer_timeout=60) as run:
        run.log({"loss": float(rank)}, step=0)
        assert run.flush(timeout=20)
        dist.barrier()
        begin = time.monotonic()
        if rank == 1:
            time.sleep(float(seconds))
        for step in range(1, STEPS):
            run.log({"loss": 2.0 * step + rank, f"own_{rank}": 1.0}, step=step)
        sys.stdout.write(f"\nLOOP {rank} {time.monotonic() - begin:.2f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
