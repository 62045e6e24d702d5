"""Two ranks with different configs; W&B's agent passes a sweep's values to rank 0 only."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator

import dist_wandb
from dist_wandb import DistWandbTracker


def saw(where: str, config: Any) -> None:
    assert config["steps"] == 7, "a missing name is polled for at once"
    sys.stdout.write(f"\nSAW {where} {json.dumps(dict(config))}\n")


def main(directory: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(dir=str(directory / "accelerate"), id="exp"))
    rank = accelerator.process_index
    if rank == 0:
        sweep = directory / "sweep.yaml"
        sweep.write_text("wandb_version: 1\nlr:\n  value: 0.5\n")
        os.environ.update(WANDB_SWEEP_ID="sweep", WANDB_SWEEP_PARAM_PATH=str(sweep), WANDB_PROJECT="tests")
        accelerator.init_trackers("tests", config={"lr": 0.1, "model": object(), "net": {"h": [1]}})
        accelerator.get_tracker("wandb", unwrap=True).config["steps"] = 7
    accelerator.wait_for_everyone()
    saw("accelerate", accelerator.get_tracker("wandb", unwrap=True).config)
    accelerator.log({"loss": 0.5}, step=1)
    for mode in ("auto", "shared"):
        config = {"lr": 0.1 * (rank + 1), "model": object(), "net": {"h": [1]}}
        arguments: dict[str, Any] = {"id": f"exp-{mode}", "dir": str(directory / mode), "config": config}
        with dist_wandb.init("tests", run_mode=mode, **arguments, reinit="create_new") as run:
            if rank == 0:
                run.run.config.update({"steps": 7})
            dist.barrier()
            saw(mode, run.config)
            run.log({"loss": 0.5}, step=1)
            dist.barrier()
    arguments = {"id": "exp-new", "dir": str(directory / "new"), "config": {"lr": 0.1}}
    with dist_wandb.init("tests", run_mode="new", **arguments, reinit="create_new") as run:
        dist.barrier()
        run.flush()
        sys.stdout.write(f"\nSAW new {run.id} {run.config['lr']}\n")
        dist.barrier()
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
