"""Restarts of a job: environments of launchers, and the remains of the earlier start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeWandb

from dist_wandb.session import registry
from dist_wandb.session.restart import DIRECTORY
from dist_wandb.session.session import Session

RECORDS = Path("wandb") / DIRECTORY
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
Start = Callable[..., list[Session]]


def kill(sessions: list[Session]) -> list[Session]:
    """End a job as SIGKILL does: none of its code is called again. Return its sessions."""
    for session in sessions:
        registry.remove(session)
    return sessions


def attempt(number: int, place: str = "/agent/none_y") -> dict[str, str]:
    return {
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": f"{place}/attempt_{number}/0/error.json",
    }


def ids(sessions: list[Session]) -> list[str | None]:
    return [session.id for session in sessions]


def given(fake_wandb: FakeWandb, name: str, *, last: int = 2) -> list[Any]:
    """Return the values of an argument in the last calls of `wandb.init`."""
    return [arguments.get(name) for arguments in fake_wandb.arguments[-last:]]


def record_files() -> list[str]:
    return sorted(path.name.partition("-")[0] for path in RECORDS.glob("*.json")) if RECORDS.exists() else []


def last_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
