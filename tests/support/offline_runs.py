"""Offline runs on disk for tests: sidecars, ranks of a shared run, full disks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from record_files import Record, definition, end, header, run, write_run


def sidecar_record(**changes: Any) -> dict[str, Any]:
    """Return a complete `dist-wandb.json` of rank 1 of 2, with changes."""
    return {
        "format": 1,
        "run_id": "exp",
        "base_id": "exp",
        "run_mode": "shared",
        "rank_scope": "global",
        "shared": True,
        "label": "rank-1",
        "primary": False,
        "group": None,
        "global_rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "world_size": 2,
        "num_nodes": 1,
        **changes,
    }


def fill_disk(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def write_rank(top: Path, rank: int, *records: Record, ended: int | None = 0) -> Path:
    """Write and return the file of one rank of a shared run whose primary is rank 0; `ended` is its exit code."""
    begin = [header(), run(config={"lr": 0.1, "rank": rank}), definition()]
    ending = [] if ended is None else [end(ended)]
    directory = write_run(top / f"rank-{rank}", records=[*begin, *records, *ending])
    is_primary = rank == 0
    changes = {"label": f"rank-{rank}", "primary": is_primary}
    sidecar = sidecar_record(run_id="exp", base_id="exp", global_rank=rank, world_size=1024, **changes)
    (directory / "dist-wandb.json").write_text(json.dumps(sidecar))
    return directory / "run-exp.wandb"
