"""Fabric on two ranks: it only ever calls `log_metrics` of its loggers, so the end of a run is never signalled."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from dist_wandb import DistWandbLogger, Limits
from dist_wandb.session import registry
from dist_wandb.settings.plan import RUN_MODES, check_choice

STEPS = 4


def work(fabric: Fabric, how: str) -> None:
    model: Any = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        loss = model(torch.ones(2, 2)).mean()
        fabric.backward(loss)
        optimizer.step()
        fabric.log_dict({"loss": 10.0 * fabric.global_rank + step}, step=step)
    for logger in fabric.loggers:
        if isinstance(logger, DistWandbLogger):
            logger.log_hyperparams({"lr": 0.1, "seen_by": fabric.global_rank})
            logger.log_image("image", [np.full((2, 2, 3), fabric.global_rank, dtype=np.uint8)], step=STEPS)
    for session in registry.open_sessions():
        session.flush()  # a rank that fails does not wait for others
    fabric.barrier()
    if how == "raises" and fabric.global_rank == 1:
        raise RuntimeError("training failed")
    if how == "raises":
        time.sleep(60)  # no communication, so that only a signal ends this rank


def main(directory: str, strategy: str, *scenarios: str) -> None:
    """Each scenario is a run mode, and perhaps " raises"."""
    for scenario in scenarios:
        mode, _, how = scenario.partition(" ")
        place = Path(directory) / scenario.replace(" ", "-")
        logger = DistWandbLogger(
            save_dir=place,
            project="tests",
            id=mode,
            offline=True,
            run_mode=check_choice("run_mode", mode, RUN_MODES),
            limits=Limits(heartbeat=4.0),  # as `stored.PATIENT`
        )
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, loggers=[logger])
        launch: Any = fabric.launch  # its type knows functions without further arguments only
        is_last = scenario == scenarios[-1]
        with contextlib.nullcontext() if is_last else contextlib.suppress(Exception):
            launch(work, how)
        sys.stdout.write(f"\nAFTER {scenario}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
