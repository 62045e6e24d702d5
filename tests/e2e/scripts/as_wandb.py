"""A script with ``import dist_wandb as wandb`` and W&B's common idioms, on all ranks or under a rank check."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

import dist_wandb as wandb

RANK = int(os.environ["RANK"])
MASTER = RANK == 0


def saw(*facts: object) -> None:
    sys.stdout.write(f"SAW {' '.join(map(str, facts))}\n")
    sys.stdout.flush()


def train(model: torch.nn.Module) -> None:
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if wandb.run is not None:
            wandb.log({"loss": 2.0 * step + RANK}, step=step)
        if wandb.run is not None and MASTER:
            wandb.log({"guarded": step}, step=step, commit=False)
        wandb.log({"val/accuracy": 0.5, "epoch": step}, step, True)


def use_all_of_it(model: torch.nn.Module) -> None:
    wandb.define_metric("val/*", step_metric="epoch", summary="max")
    wandb.config.update({"parameters": 20}, allow_val_change=True)
    wandb.config.depth = 2
    wandb.config["width"] = 3
    wandb.watch(model, log="all", log_freq=1)
    train(model)
    wandb.unwatch(model)
    wandb.log({"image": wandb.Image(np.zeros((2, 2, 3), dtype=np.uint8), caption="black")})
    wandb.log({"table": wandb.Table(columns=["x"], data=[[1]]), "histogram": wandb.Histogram([1.0, 2.0])})
    wandb.log({"plot": wandb.plot.line(wandb.Table(columns=["x", "y"], data=[[1, 2]]), "x", "y")})
    Path("notes.txt").write_text("notes", encoding="utf-8")
    wandb.save("notes.txt", policy="now")
    artifact = wandb.Artifact("weights", type="model")
    with artifact.new_file("weights.txt") as file:
        file.write("1.0")
    wandb.log_artifact(artifact, aliases=["best"])
    wandb.alert(title="trained", text="all of it", level=wandb.AlertLevel.INFO)
    wandb.mark_preempting()
    wandb.summary["best"] = 0.5
    assert wandb.run is not None
    wandb.run.summary.update({"last": 0.25})


def main() -> None:
    """Use wandb before, during and after a run; then a run in a block."""
    saw("before", RANK, wandb.run)
    try:
        wandb.log({"early": 1})
    except wandb.Error as error:
        saw("early", RANK, error)
    config = {"lr": 0.1, "rank": RANK}
    run = wandb.init(project="tests", name="early", config=config, tags=["a"], settings=wandb.Settings(silent=True))
    assert wandb.run is not None
    wandb.run.name = "all-of-it"
    wandb.run.tags += ("b",)
    use_all_of_it(torch.nn.Linear(4, 4))
    saw("run", RANK, wandb.run is run, run.project, wandb.config.lr, wandb.config["lr"], wandb.config.get("none", 1))
    saw("ids", wandb.run.id == run.id, run.id)
    wandb.finish(exit_code=0)
    saw("after", RANK, wandb.run)

    with wandb.init(project="tests", name="block", reinit=True, settings={"silent": True}) as block:
        block.log({"note": "of the next call"}, commit=False)
        block.log({"acc": float(RANK), "global_step": 5})
        block.log({"loss": float(RANK)}, step=0)
        wandb.log({"loss": float(RANK)}, step=1, weight=1 + 2 * RANK)
    saw("after", RANK, wandb.run)

    if MASTER:  # the most common start
        wandb.init(project="tests", name="guarded", config=config, settings=wandb.Settings(silent=True))
    if wandb.run is not None:
        wandb.log({"loss": 1.0})
    if MASTER:
        wandb.finish()


main()
