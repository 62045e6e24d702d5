"""Carry out scripts with stock wandb or with this package: WHICH GUARD DIRECTORY SCRIPTS.

All scripts of a file are carried out one after the other, each as one run. Under the guard ``log``, all ranks open the
runs, but only rank 0 logs and writes; under ``init`` only rank 0 opens them; under ``none`` all ranks do the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
HEARTBEATS = {"none": 4.0}  # seconds: a late rank on a busy machine is waited for; it is missing under a guard


class PlannedError(Exception):
    """Raised by a script that should end with an exception."""


def play(wandb: Any, script: dict[str, Any], directory: str, guard: str, options: dict[str, Any]) -> None:
    if guard == "init" and RANK:
        return
    is_writing = guard == "none" or not RANK
    named = {"project": "oracle", "id": script["name"], "dir": directory, "config": script["config"]}
    with contextlib.suppress(PlannedError), wandb.init(**named, **options) as run:
        owner = run if script["by"] == "run" else wandb
        for operation in script["operations"]:
            if is_writing or operation["do"] in ("define", "end", "behind"):
                carry_out(owner, operation)
                if WORLD_SIZE > 1 and operation["do"] == "log":
                    time.sleep(script["pace"])


def carry_out(owner: Any, operation: dict[str, Any]) -> None:
    kind, values = operation["do"], operation.get("values", {})
    if kind == "log":
        given = {name: operation[name] for name in ("step", "commit") if name in operation}
        owner.log(values, **given)
    elif kind == "define":
        owner.define_metric(operation["name"], **operation["options"])
    elif kind in ("summary", "config"):
        target = getattr(owner, kind)
        if operation["by"] == "update":
            target.update(values, **({"allow_val_change": True} if kind == "config" else {}))
        else:
            for name, value in values.items():
                target[name] = value
    elif kind == "behind":
        if WORLD_SIZE > 1 and operation["rank"] == RANK:
            time.sleep(operation["seconds"])
    elif operation["how"] == "raise":
        raise PlannedError
    elif operation["how"] == "code":
        owner.finish(exit_code=operation["code"])


def main(which: str, guard: str, directory: str, file: str) -> None:
    options: dict[str, Any] = {}
    if which == "stock":
        import wandb
    else:
        import dist_wandb as wandb  # type: ignore[no-redef]

        options["limits"] = {"heartbeat": HEARTBEATS.get(guard, 1.0)}
        if WORLD_SIZE > 1:
            import torch.distributed as dist

            dist.init_process_group("gloo")
    for script in json.loads(Path(file).read_text(encoding="utf-8")):
        began = time.monotonic()
        play(wandb, script, directory, guard, options)
        sys.stdout.write(f"PLAYED {RANK} {script['name']} {time.monotonic() - began:.2f}\n")
    if which != "stock" and WORLD_SIZE > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
