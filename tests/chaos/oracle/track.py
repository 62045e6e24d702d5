"""Fixed scripts with Accelerate, by its own tracker or by ours, in any number of processes: WHICH DIRECTORY."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

RANK = int(os.environ.get("RANK", "0"))
ROUNDS = 6


def steps(accelerator: Any, name: str) -> None:  # noqa: ARG001  # one signature for all
    """A value each step, more every second one, several calls at one step."""
    for step in range(ROUNDS):
        if step == 2 and RANK == 1:
            time.sleep(0.15)
        accelerator.log({"loss": 1 / (step + 1), "lr": 0.1}, step=step)
        if step % 2 == 0:
            accelerator.log({"val": {"acc": step / 8}, "note": f"step {step}"}, step=step)


def calls(accelerator: Any, name: str) -> None:
    """Calls without steps, some of which are parts of a row."""
    for number in range(ROUNDS):
        if number == 3 and RANK == 1:
            time.sleep(0.1)
        accelerator.log({"part": number}, log_kwargs={name: {"commit": False}})
        accelerator.log({"loss": 1 / (number + 1)})
        if number % 3 == 0:
            accelerator.log({"epoch_loss": number / 4})


def run_itself(accelerator: Any, name: str) -> None:
    """The run behind the tracker, with an axis of its own, a summary and a config."""
    run = accelerator.get_tracker(name, unwrap=True)
    run.define_metric("samples")
    run.define_metric("val/*", step_metric="samples")
    for number in range(ROUNDS):
        accelerator.log({"loss": 1 / (number + 1), "samples": 8 * number}, step=number)
        if number % 2:
            run.log({"val/acc": number / 8, "samples": 8 * number}, step=number)
    run.summary["best"] = 0.5
    run.config.update({"found": 3}, allow_val_change=True)


SCRIPTS: dict[str, Callable[[Any, str], None]] = {"steps": steps, "calls": calls, "run": run_itself}
NAMES = tuple(SCRIPTS)


def main(which: str, directory: str) -> None:
    for name, script in SCRIPTS.items():
        if which == "stock":
            accelerator = Accelerator(cpu=True, log_with="wandb")
            accelerator.init_trackers(
                "oracle", config={"lr": 0.1}, init_kwargs={"wandb": {"id": name, "dir": directory}}
            )
        else:
            from dist_wandb import DistWandbTracker

            tracker = DistWandbTracker(id=name, dir=directory)
            accelerator = Accelerator(cpu=True, log_with=tracker)
            accelerator.init_trackers("oracle", config={"lr": 0.1})
        script(accelerator, "wandb" if which == "stock" else "dist_wandb")
        trackers = accelerator.trackers if which == "stock" else [tracker]
        for its in trackers:  # `end_training` ends the process group, too
            its.finish()
    accelerator.wait_for_everyone()  # rank 0 hosts the store


if __name__ == "__main__":
    main(*sys.argv[1:])
