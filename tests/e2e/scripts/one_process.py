"""The same calls of `log` in one process, with stock wandb and with this package; and rows that are open at the end.

The runs are below ``stock/NAME`` and ``ours/NAME``, and those of all kinds of ends below ``ends/NAME``. The process
ends with an exception.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import wandb

import dist_wandb


def without_values(run: Any) -> None:
    run.log({"a": 1}, step=4)
    run.log({}, step=5)
    run.log({}, step=6)
    run.log({"b": 2}, step=6, commit=True)
    run.log({"c": 3}, step=7)
    run.log({}, commit=True)
    run.log({}, step=8)


def values_that_are_not_numbers(run: Any) -> None:
    run.log({"n": {"a": 1, "b": 2}, "text": "x", "none": None}, step=1)
    run.log({"n": {"b": 3, "c": {"d": 4}}, "list": [1, 2]}, step=1)
    run.log({"n": {"a": 9}, "array": np.float32(0.5)}, step=1)
    run.log({"histogram": wandb.Histogram([1.0, 2.0])}, step=2)
    run.log({"loss": 0.5}, step=2)
    run.log({"text": "y"}, step=3)


def summaries_between(run: Any) -> None:
    run.define_metric("best", summary="max")
    run.log({"a": 1, "best": 5}, step=1)
    run.summary["a"] = 99  # overwritten when the row ends
    run.log({"b": 1, "best": 3}, step=2)
    run.log({"c": 1})  # ends the row
    run.summary["c"] = 50
    run.summary["seen"] = run.summary.get("a")
    run.log({"d": 1}, step=3)
    run.summary["unseen"] = run.summary.get("d")
    run.summary["d"] = 60


CASES: tuple[Callable[[Any], None], ...] = (without_values, values_that_are_not_numbers, summaries_between)


def directory(*names: str) -> str:
    path = Path(*names)
    path.mkdir(parents=True)
    return str(path)


def leave_open(run: Any) -> None:
    run.log({"a": 1}, step=1)
    run.log({"b": 2}, step=1)


def main() -> None:
    """Log with both packages; then end runs with an open row in all ways."""
    for case in CASES:
        for way, module in (("stock", wandb), ("ours", dist_wandb)):
            run: Any = module.init(project="rows", dir=directory(way, case.__name__))
            case(run)
            run.finish()
    leave_open(dist_wandb.init(dir=directory("ends", "wandb.finish")))
    wandb.finish()
    with wandb.init(dir=directory("ends", "block of wandb")):
        leave_open(dist_wandb.init())
    session = dist_wandb.init(dir=directory("ends", "block of the run"))
    with session.run:
        leave_open(session)
    leave_open(dist_wandb.init(dir=directory("ends", "new run")))
    wandb.init(dir=directory("beside"), reinit="finish_previous").finish()
    leave_open(dist_wandb.init(dir=directory("ends", "teardown")))
    wandb.teardown()
    dist_wandb.finish()
    leave_open(dist_wandb.init(dir=directory("ends", "exception")))
    raise ValueError("at the end")


main()
