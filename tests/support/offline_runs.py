"""Offline runs on disk for tests: sidecars, directories that cannot be read."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest


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
