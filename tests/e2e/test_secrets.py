"""Secrets in configs appear neither in the job's store nor in the output."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import rank_commands, run_job
from wire import tapped

import dist_wandb
from dist_wandb.errors import ConfigurationError

SECRET = "s3cr3t"  # noqa: S105  # prefix of all secrets
LINES = Path(__file__).read_text(encoding="utf-8").splitlines()
INIT = next(number for number, line in enumerate(LINES, 1) if line.startswith("        with dist_wandb.init("))


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


def keep_secrets(host: str, port: str, place: str) -> None:
    """Two ranks whose configs hold secrets in many spellings, and ordinary values that differ. Prints no secret."""
    directory = Path(place)
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


def test_secrets_of_a_config_are_neither_in_the_store_nor_in_the_output(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with tapped(store.port) as wire:
        job = rank_commands(keep_secrets, "127.0.0.1", wire.port, tmp_path, world_size=2)
        finished = run_job(*job, cwd=tmp_path).check()
        traffic = wire.traffic
    seen = {tuple(line.split(" ", 3)[1:3]): json.loads(line.split(" ", 3)[3]) for line in finished.lines("SAW ")}
    for (mode, rank), values in seen.items():
        own_run = mode == "new" and rank == "1"
        assert values == {
            "lr": 1.5 if own_run else 0.5,
            "max_tokens": 512,
            "own": True,
            "nested": True,
            "later": rank == "0",
            "steps": 7,
        }, (mode, rank)
    assert len(seen) == 6
    whys = finished.lines("WHY ")
    assert {line.split()[1] for line in whys} == {"KeyError", "AttributeError"}
    assert all("'later_token' is in the config of the run" in why for why in whys)
    assert all("by its name or its text it is a secret" in why for why in whys)

    # Ordinary values are compared, published and shown as usual.
    assert b"max_tokens" in traffic
    warning = "UserWarning: The ranks were given different configs: 'lr' is 1.5 on rank 1, but 0.5 on rank 0"
    assert f"test_secrets.py:{INIT}: {warning}" in finished.output
    assert finished.output.count("REFUSED config_sync='check', but the ranks were given different configs: 'lr'") == 2
    assert "'net' is {'size': 1, 'api_key': …} " in finished.output
    assert "W&B cannot hold these values" in finished.output

    leaks = {match.decode() for match in re.findall(SECRET.encode() + rb"[\w-]*", traffic)}
    assert leaks == set()
    assert re.findall(rf".*{SECRET}.*", finished.output) == []
