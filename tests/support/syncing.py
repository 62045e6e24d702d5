"""``dist-wandb sync`` with the real ``wandb sync``, which sends to the stand-in for W&B's server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from processes import Finished, run_job
from wandb_server import MEASURED, WandbServer

import dist_wandb

MODULES = os.pathsep.join([str(Path(dist_wandb.__file__).parents[1]), str(Path(__file__).parent)])
WATCHED = {"WANDB_CONSOLE": "wrap", **MEASURED}
IMPATIENT = {f"WANDB_X_{client}_RETRY_MAX": "1" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}
TIMEOUT = 120


def sync_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "dist_wandb", "sync", *map(str, arguments)]


def sync_environment(server: WandbServer, directory: Path, **variables: str) -> dict[str, str]:
    return server.environment(directory, PYTHONPATH=MODULES, **{**WATCHED, **IMPATIENT, **variables})


def sync(server: WandbServer, directory: Path, *options: str, **variables: str) -> Finished:
    """Upload the runs below a directory, which is also the place of W&B's caches and of the state of uploads."""
    command, environment = sync_command(*options, directory), sync_environment(server, directory, **variables)
    return run_job(command, cwd=directory, environment=environment, timeout=TIMEOUT)
