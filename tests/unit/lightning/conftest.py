"""Processes that Lightning's ddp strategy starts from the script, played by one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_wandb.lightning import launching
from dist_wandb.lightning.launching import ScriptIds


@pytest.fixture
def begin_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Begin the script as in a new process: the main one, or one with local rank 1 that `parent` has started.

    Returns the directory of the ids that the main process passes to its children.
    """
    place = tmp_path / "offered"
    place.mkdir()

    def begin(parent: int | None = None) -> Path:
        monkeypatch.setattr(launching, "script_ids", ScriptIds(place))
        if parent is not None:
            for variable, value in {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
                monkeypatch.setenv(variable, value)
            monkeypatch.setattr(os, "getppid", lambda: parent)
        return place

    return begin
