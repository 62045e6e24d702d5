"""Histograms of `watch` are in the rows in which wandb alone writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from history import history_of
from processes import clean_environment, run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "watched.py"
WRITERS = {"stock": 1, "auto": 1, "shared": 2}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("watched")
    for kind in WRITERS:
        for how in ("steps", "counted"):
            (directory / kind / how).mkdir(parents=True)
        commands = ([sys.executable, SCRIPT, kind],) if kind == "stock" else torchrun(SCRIPT, kind)
        run_job(*commands, cwd=directory / kind, environment=clean_environment(WANDB_SILENT="true")).check()
    return directory


def gradients(directory: Path, kind: str, how: str, label: str = "") -> list[tuple[Any, Any]]:
    """Return loss and gradient by place on the x axis, in order."""
    loss = f"{label}loss"
    histories = [history_of(run) for run in ended_runs(directory / kind / how, WRITERS[kind])]
    (history,) = [history for history in histories if loss in history.names]
    (bins,) = [name for name in history.names if name.startswith(f"{label}gradients/") and name.endswith(".bins")]
    found: dict[Any, list[Any]] = {}  # by place: rank 1 of a shared run writes media in a row of their own
    for number, row in enumerate(history.rows):
        at = found.setdefault(row.get("global_step", number), [None, None])
        at[:] = [row.get(loss, at[0]), row.get(bins, [at[1]])[0]]
    return [(loss, gradient) for loss, gradient in found.values() if (loss, gradient) != (None, None)]


@pytest.mark.parametrize("how", ["steps", "counted"])
def test_watched_gradients_are_in_the_rows_that_wandb_gives_them(how: str, jobs: Path) -> None:
    expected = gradients(jobs, "stock", how)
    assert sum(None not in row for row in expected) >= 7
    assert gradients(jobs, "auto", how) == expected
    assert gradients(jobs, "shared", how, "rank-1/") == expected
