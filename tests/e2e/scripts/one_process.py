"""Rows that are open at the end of a run, in one process: the runs of all kinds of ends are below ``ends/NAME``.

The process ends with an exception.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

import dist_wandb


def directory(*names: str) -> str:
    path = Path(*names)
    path.mkdir(parents=True)
    return str(path)


def leave_open(run: Any) -> None:
    run.log({"a": 1}, step=1)
    run.log({"b": 2}, step=1)


def main() -> None:
    """End runs with an open row in all ways."""
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
