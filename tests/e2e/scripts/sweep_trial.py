"""A trial of a sweep on one rank: it prints the trial's values that it sees, and logs rows that depend on them."""

import json
import sys
from typing import Any

import torch.distributed as dist

import dist_wandb


def main(*arguments: str) -> None:
    given: Any = dict(argument.lstrip("-").split("=") for argument in arguments)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with dist_wandb.init("elsewhere", run_mode=given["run_mode"], id="mine", config={"lr": 7.0, "rank": 0}) as run:
        sys.stdout.write(f"\nSAW {rank} {run.id} {json.dumps(dict(run.config), sort_keys=True)}\n")
        for step in range(3):
            run.log({"loss": run.config["lr"] * (1 + rank)}, step=step)
        run.flush(together=True)
        dist.barrier()
        if given["run_mode"] == "shared":
            raise ArithmeticError
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
