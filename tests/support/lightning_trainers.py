"""Trainers of Lightning on the CPU, without output, and a process that looks like one of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer


def quiet_trainer(logger: Any, **arguments: Any) -> Trainer:
    """Return a Trainer of one epoch that logs each step, and saves no checkpoint unless `arguments` say so."""
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    short = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
    return Trainer(logger=logger, **{**silent, **short, **arguments})


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Set the variables that a launcher of two processes sets. They name the job, so no store is needed."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for variable, value in {**ranks, "PMIX_NAMESPACE": "prterun-1"}.items():
        monkeypatch.setenv(variable, str(value))
