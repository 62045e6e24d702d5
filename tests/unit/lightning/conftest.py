"""Processes that Lightning's ddp strategy starts from the script, played by one process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from new_process import forget_notes

from dist_wandb.lightning import launching
from dist_wandb.lightning.launching import ScriptIds


@pytest.fixture
def begin_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Begin the script as in a new process: the main one, or one with local rank 1 that `parent` has started."""

    def begin(parent: int | None = None) -> None:
        monkeypatch.setattr(launching, "script_ids", ScriptIds())
        if parent is None:
            forget_notes()
        else:
            for variable, value in {"NODE_RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
                monkeypatch.setenv(variable, value)
            monkeypatch.setattr(os, "getppid", lambda: parent)

    return begin
