"""What a script logs and then changes, and what it asks of its run right after `log`, on two ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from PIL import Image

import dist_wandb as wandb

RANK = int(os.environ["RANK"])
STEPS = (100, 200, 300)
WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "shared": {"run_mode": "shared"},
    "new": {"run_mode": "new"},
    "none": {"reduce": None},
}


def saw(*facts: object) -> None:
    sys.stdout.write(f"SAW {' '.join(map(str, facts))}\n")
    sys.stdout.flush()


def log_what_changes(way: str) -> None:
    growing = wandb.Table(columns=["x", "y"], log_mode="MUTABLE")
    increments = wandb.Table(columns=["x", "y"], log_mode="INCREMENTAL")
    charted = wandb.Table(columns=["x", "y"], log_mode="MUTABLE")
    figure = go.Figure(go.Scatter(x=[0, 1], y=[0, 1]))
    kinds: set[str] = set()
    picture = Path(f"{way}-{RANK}.png")
    for step in STEPS:
        for table in (growing, increments, charted):
            table.add_data(step, step)
        figure.update_layout(title=str(step))
        kinds.add(str(step))
        Image.new("RGB", (2, 2), (step % 256, 0, 0)).save(picture)
        row = {
            "growing": growing,
            "chart": wandb.plot.scatter(charted, "x", "y"),
            "kinds": kinds,
            "deep": {"image": wandb.Image(str(picture)), "figure": figure, "steps": {"increments": increments}},
        }
        wandb.log({"loss": RANK + step, **row}, step=step)
        figure.update_layout(title="changed")
    picture.unlink()


def ask(way: str) -> None:
    run = wandb.run
    assert run is not None
    asked: list[tuple[Any, ...]] = []
    for loss in (0.5, 0.25):
        wandb.log({"loss": loss})
        asked.append((run.step, run.summary.get("loss")))
    wandb.log({"acc": 0.75}, step=200)
    asked.append((run.step, run.summary["acc"]))
    asked.append((run.run.step, run.run.summary["acc"], run.run.starting_step))
    run.log(data={"val": 1}, step=run.step)
    run.log_model(path=__file__, name=f"model-{way}")
    saw("asked", way, RANK, *asked)
    for name in ("top1", "eval.top5"):
        run.define_metric(name, summary="max")
        run.define_metric(name, summary="mean")  # W&B adds it
    for top in (0.25, 0.75, 0.5):
        wandb.log({"top1": top, "eval": {"top5": top}})
    run.summary["best"] = {"epoch": 1}
    run.summary["best"]["epoch"] = 2
    run.tags += ("new",)
    run.notes = "all of it"
    tops = [tops[name] for tops in (run.summary["top1"], run.summary["eval"]["top5"]) for name in ("max", "mean")]
    saw("parts", way, RANK, *tops, run.summary["best"]["epoch"], *run.tags, run.notes)


def define_between_rows() -> None:
    for step, top in enumerate((0.9, 0.1), 300):
        wandb.log({"top": top, "epoch": 1}, step=step, commit=True)
    metric = wandb.define_metric("top", step_metric="epoch")
    try:
        wandb.define_metric("top", summary="largest")
    except wandb.Error as error:
        saw("refused", RANK, error)
    for step, top in enumerate((0.5, 0.3), 302):
        wandb.log({"top": top}, step=step, commit=True)
    last = wandb.summary.get("top")  # the refused summary does not count
    wandb.define_metric("never")
    wandb.log({"last": 0.5}, step=304)  # its row is open until the end
    wandb.define_metric("last", summary="max")
    saw("defined", RANK, getattr(metric, "name", None), last)


def main() -> None:
    for way, options in WAYS.items():
        with wandb.init(project="p", name=f"changed-{way}", dir=way, **options):
            log_what_changes(way)
        with wandb.init(project="p", name=f"asked-{way}", dir=f"asked-{way}", **options):
            ask(way)
            define_between_rows()
    for _ in range(2):
        with wandb.init(project="p", id="again", resume="allow", dir="again") as run:
            saw("starts", RANK, run.starting_step, run.step, run.run.starting_step, run.run.step)
            wandb.log({"loss": 1.0}, step=300)


if __name__ == "__main__":
    main()
