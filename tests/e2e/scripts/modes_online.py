"""One rank of plain PyTorch, online: every mode and scope in turn, each in its own project."""

import sys

import torch.distributed as dist
from stored import COMBINATIONS, PATIENT, ROWS

import dist_wandb


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    for run_mode, rank_scope in COMBINATIONS:
        with dist_wandb.init(
            f"{run_mode}-{rank_scope}",
            run_mode=run_mode,
            rank_scope=rank_scope,
            limits=dist_wandb.Limits(heartbeat=PATIENT),
            id="exp",
            name="nm",
            tags=["online"],
            dir=directory,
            config={"lr": 0.1},
        ) as run:
            for row in range(ROWS):
                run.log({"loss": 10.0 * run.topology.global_rank + row})
            sys.stdout.write(f"hello from {run.topology.global_rank}\n")
    dist.barrier()  # rank 0 may host the store that others need for their last run
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
