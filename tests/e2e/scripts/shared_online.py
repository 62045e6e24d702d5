"""One rank that logs into a shared run, online or as the environment specifies."""

import sys

import torch.distributed as dist
from stored import PATIENT
from wandb_client import wait_for_measurement

import dist_wandb


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    with dist_wandb.init(
        "tests",
        run_mode="shared",
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        id="exp",
        name="nm",
        group="g",
        job_type="train",
        notes="why",
        tags=["t"],
        dir=directory,
        config={"lr": 0.1},
    ) as run:
        for step in range(5):
            run.log({"loss": 2.0 * step + run.topology.global_rank}, step=step)
        sys.stdout.write(f"hello from {run.topology.global_rank}\n")
        wait_for_measurement(run.run.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
