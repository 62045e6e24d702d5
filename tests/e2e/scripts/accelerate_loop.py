"""Accelerate: every mode and scope in turn; trackers by instance, by name or attached, guarded or not."""

import sys
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


def train(how: str, guard: str, arguments: dict[str, Any]) -> None:
    accelerator, init_kwargs = accelerator_and_init_kwargs(how, arguments)
    if how == "attach":
        attached = DistWandbTracker.attach(accelerator, "tests", config={"lr": 0.1}, **arguments)
    elif guard == "everywhere" or accelerator.is_main_process:
        accelerator.init_trackers("tests", config={"lr": 0.1}, init_kwargs=init_kwargs)
    log = attached.log if how == "attach" else accelerator.log
    for row in range(ROWS):
        log({"loss": 10.0 * accelerator.process_index + row}, step=row)
    accelerator.wait_for_everyone()
    tracker = attached if how == "attach" else accelerator.get_tracker("dist_wandb")
    assert isinstance(tracker, DistWandbTracker)
    sys.stdout.write(f"\nSAW rank {accelerator.process_index} id {tracker.session.id}\n")
    if how != "attach":
        assert accelerator.get_tracker("dist_wandb", unwrap=True) is tracker.tracker
    accelerator.wait_for_everyone()
    tracker.finish()


def main(directory: str, how: str, guard: str) -> None:
    for run_mode, rank_scope in COMBINATIONS:
        into = Path(directory) / f"{run_mode}-{rank_scope}"
        arguments = {"run_mode": run_mode, "rank_scope": rank_scope, "id": "exp", "name": "nm", "dir": str(into)}
        train(how, guard, {**arguments, "limits": {"heartbeat": PATIENT}})
    Accelerator().end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
