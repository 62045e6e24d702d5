"""Accelerate: every mode and scope in turn, by trackers given by instance, by name or attached."""

import sys
from itertools import cycle
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from stored import COMBINATIONS, PATIENT, ROWS

from dist_wandb.accelerate import DistWandbTracker


def accelerator_and_init_kwargs(how: str, arguments: dict[str, Any]) -> tuple[Accelerator, dict[str, Any]]:
    if how == "instance":
        return Accelerator(cpu=True, log_with=DistWandbTracker(**arguments)), {}
    if how == "name":
        return Accelerator(cpu=True, log_with="dist_wandb"), {"dist_wandb": arguments}
    return Accelerator(cpu=True), {}


def train(how: str, arguments: dict[str, Any]) -> None:
    accelerator, init_kwargs = accelerator_and_init_kwargs(how, arguments)
    if how == "attach":
        attached = DistWandbTracker.attach(accelerator, "tests", config={"lr": 0.1}, **arguments)
    elif how == "instance" or accelerator.is_main_process:
        accelerator.init_trackers("tests", config={"lr": 0.1}, init_kwargs=init_kwargs)
    log = attached.log if how == "attach" else accelerator.log
    for row in range(ROWS):
        log({"loss": 10.0 * accelerator.process_index + row}, step=row)
    accelerator.wait_for_everyone()
    tracker = attached if how == "attach" else accelerator.get_tracker("dist_wandb")
    assert isinstance(tracker, DistWandbTracker)
    if how != "attach":
        assert accelerator.get_tracker("dist_wandb", unwrap=True) is tracker.tracker
    accelerator.wait_for_everyone()
    tracker.finish()


def main(directory: str) -> None:
    for (run_mode, rank_scope), how in zip(COMBINATIONS, cycle(("instance", "name", "attach")), strict=False):
        into = Path(directory) / f"{run_mode}-{rank_scope}"
        arguments = {"run_mode": run_mode, "rank_scope": rank_scope, "id": "exp", "name": "nm", "dir": str(into)}
        train(how, {**arguments, "limits": {"heartbeat": PATIENT}})
    Accelerator().end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
