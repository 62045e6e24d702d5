"""Secrets in configs appear neither in the job's store nor in the output."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from processes import run_job
from ranks import rank_commands
from wire import tapped

SECRET = "s3cr3t"  # noqa: S105  # prefix of all secrets of the script
SCRIPT = Path(__file__).parent / "scripts" / "config_secrets.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
INIT = next(number for number, line in enumerate(LINES, 1) if "with dist_wandb.init(" in line)


def test_secrets_of_a_config_are_neither_in_the_store_nor_in_the_output(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with tapped(store.port) as wire:
        job = rank_commands(SCRIPT, "127.0.0.1", wire.port, tmp_path, world_size=2)
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
    assert f"config_secrets.py:{INIT}: {warning}" in finished.output
    assert finished.output.count("REFUSED config_sync='check', but the ranks were given different configs: 'lr'") == 2
    assert "'net' is {'size': 1, 'api_key': …} " in finished.output
    assert "W&B cannot hold these values" in finished.output

    leaks = {match.decode() for match in re.findall(SECRET.encode() + rb"[\w-]*", traffic)}
    assert leaks == set()
    assert re.findall(rf".*{SECRET}.*", finished.output) == []
