"""Fixtures of the tests of W&B runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb


@pytest.fixture
def fresh_wandb(bare_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: ARG001  # goes first
    """A real wandb that has not read its settings files yet; the value is the directory of its files."""
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield tmp_path
    wandb.teardown()
