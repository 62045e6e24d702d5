"""Under torchrun, rank 0 opens its run before there is a process group, the others after."""

import os
import sys

import torch.distributed as dist

import dist_wandb


def main(directory: str) -> None:
    comes_early = os.environ["RANK"] == "0"
    if not comes_early:
        dist.init_process_group("gloo")
    run = dist_wandb.init("tests", run_mode="shared", dir=directory, limits=dist_wandb.Limits(join_timeout=40))
    if comes_early:
        dist.init_process_group("gloo")
    sys.stdout.write(f"\nSAW {run.id}\n")
    dist.barrier()
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
