"""Two ranks whose configs hold secrets in many spellings, and ordinary values that differ. Prints no secret."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dist_wandb
from dist_wandb.errors import ConfigurationError

SECRET = "s3cr3t"  # noqa: S105  # of nothing
"""What all secrets begin with."""


class Account:
    """W&B cannot hold it, so its repr would be written."""

    def __init__(self, password: str) -> None:
        self.password = password

    def __repr__(self) -> str:
        return f"Account(user='me', password={self.password!r})"


def config_of(rank: int) -> dict[str, Any]:
    """Return the config of a rank: a warning or an error should name different values, and show ordinary ones."""
    own = f"{SECRET}-{rank}"
    return {
        "lr": 0.5 + rank,
        "max_tokens": 512,
        "hf_token": f"{own}-a",
        "WANDB_API_KEY": f"{own}-b",
        "openaiKey": f"{own}-c",
        "db.password": f"{own}-d",
        "passWord": f"{own}-e",
        "auth": {"user": f"{own}-f", "more": [{"x": f"{own}-g"}]},
        "credentials": [f"{own}-h", {"deep": f"{own}-i"}],
        "client-secret": f"{own}-j",
        "net": {"size": rank, "api_key": f"{own}-k"},
        "inner": {"size": 1, "api_key": f"{own}-k", "list": [1, {"token": f"{own}-l"}]},
        "dsn_of_all": "x",
        "database_url": f"postgresql://joe:{own}-m@db.example/x",
        "account": Account(f"{own}-n"),
        "accounts": [Account(f"{own}-o")],
        "excluded": f"{own}-p",
        "secret": b"\xff" + own.encode(),
        "pin": {1: {"passwd": f"{own}-q"}},
    }


def read(run: Any, rank: int) -> dict[str, Any]:
    """Return what a rank reads, with secrets as booleans."""
    mine, config = config_of(rank), run.config
    deadline = time.monotonic() + 60
    while "steps" not in config and time.monotonic() < deadline:  # at once, unless the machine is very busy
        time.sleep(0.1)
    return {
        "lr": config["lr"],
        "max_tokens": config.max_tokens,
        "own": config["hf_token"] == mine["hf_token"] and config["auth"] == mine["auth"],
        "nested": config["inner"] == mine["inner"],
        "later": config.get("later_token") is not None,
        "steps": config["steps"],
    }


def say_why(look: Callable[[], object]) -> None:
    """Print why a lookup fails."""
    try:
        look()
    except (KeyError, AttributeError) as error:
        sys.stdout.write(f"\nWHY {type(error).__name__} {error.args[0]}\n")


def main(host: str, port: str, directory: Path) -> None:
    logging.basicConfig(level=logging.DEBUG)
    for name in ("wandb", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(host, int(port), 2, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    arguments: dict[str, Any] = {"config": config_of(rank), "config_exclude_keys": ["excluded"], "id": "exp"}
    for mode in ("auto", "shared", "new"):
        with dist_wandb.init("tests", run_mode=mode, dir=str(directory / mode), **arguments) as run:
            if rank == 0:
                run.config.update({"steps": 7, "later_token": f"{SECRET}-later"})
            dist.barrier()
            sys.stdout.write(f"\nSAW {mode} {rank} {json.dumps(read(run, rank))}\n")
            if mode == "auto" and rank == 1:
                say_why(lambda: run.config["later_token"])
                say_why(lambda: run.config.later_token)
            run.log({"loss": 0.5})
            dist.barrier()
    try:
        dist_wandb.init("tests", config_sync="check", dir=str(directory), **arguments)
    except ConfigurationError as error:
        sys.stdout.write(f"REFUSED {error}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
