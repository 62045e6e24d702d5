"""Starts small offline jobs in turn, each in a fork, that each resume a run; otherwise like `measured.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch  # noqa: F401  # once, for all that are forked
import wandb  # noqa: F401
from measured import forked

import dist_wandb


def run(order: dict[str, Any]) -> dict[str, Any]:
    output = Path(order["output"])

    def act() -> int:
        handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(order["cwd"])
        os.environ.clear()  # only now: a warm interpreter has imported the libraries in another environment
        os.environ.update(order["environment"])
        run = dist_wandb.init(project="tests", dir=order["dir"], id=order["id"], resume="allow")
        for value in (5.0, 6.0):
            run.log({"loss": value})
        run.finish()
        return 0

    return {**forked(act, order["limit"]), "out": str(output)}


if __name__ == "__main__":
    json.dump([run(order) for order in json.loads(Path(sys.argv[1]).read_text())], sys.stdout)
