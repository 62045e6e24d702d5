"""Offline runs on disk for tests: a stand-in for W&B's reader, sidecars, directories that cannot be read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_wandb.wandb_files import inspection


def install_reader(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the Python that runs `-m wandb leet inspect --json FILE` by a shell script, in this process."""
    reader = directory / "reader"
    reader.write_text(f"#!/bin/sh\n{script}\n")
    reader.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(reader))
    monkeypatch.setattr(inspection, "BINARY_KNOWN", frozenset())


def code_with_reader(reader: str | Path) -> str:
    """Return Python code that replaces the Python that reads files by `reader`, in the process that runs the code."""
    return (
        "import sys; from dist_wandb.wandb_files import inspection; "
        f"sys.executable, inspection.BINARY_KNOWN = {str(reader)!r}, frozenset()"
    )


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
        "update_finish_state": False,
        "group": None,
        "global_rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "world_size": 2,
        "num_nodes": 1,
        **changes,
    }


def refuse_to_scan(closed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one directory unreadable, independent of its permissions, because tests may run as root."""
    scandir = os.scandir

    def refusing(path: int) -> Any:
        if Path(f"/proc/self/fd/{path}").samefile(closed):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
