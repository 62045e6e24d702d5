"""The Hugging Face Trainer under torchrun, in typical scripts: the data that reaches W&B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import Finished, run_job, torchrun
from wandb_records import RecordedRun
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "trainer_runs.py"


def train(server: WandbServer, directory: Path, *arguments: str) -> Finished:
    """Train on two ranks."""
    mode, *rest = arguments
    job = torchrun(SCRIPT, mode, directory / "out", *rest)
    return run_job(*job, cwd=directory, environment=server.environment(directory), timeout=240)


def series(recorded: RecordedRun, name: str) -> dict[int, Any]:
    """Return the last written value of a name, by step."""
    rows = [row for writer in recorded.writers.values() for row in writer.rows]
    return {row["train/global_step"]: row[name] for row in rows if name in row}


def whole(server: WandbServer, number: int) -> list[RecordedRun]:
    """Return the runs, and check that all ended well and have the config of model and training."""
    runs = list(server.runs.values())
    assert len(runs) == number
    for run in runs:
        assert run.exit_codes == [0]
        assert (run.config["hidden_size"], run.config["max_steps"]) == (8, 3)
    return runs


@pytest.mark.parametrize("mode", ["auto", "name", "adopt"])
def test_own_numbers_become_means_and_the_trainers_are_unchanged(
    wandb_server: WandbServer, tmp_path: Path, mode: str
) -> None:
    train(wandb_server, tmp_path, mode).check()
    (run,) = whole(wandb_server, 1)
    assert series(run, "train/mine") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert list(series(run, "train/loss")) == [1, 2, 3]
    assert list(series(run, "eval/loss")) == [2, 3]


def test_values_reduced_by_the_trainer_are_not_summed_again(wandb_server: WandbServer, tmp_path: Path) -> None:
    train(wandb_server, tmp_path, "shared", "sum").check()
    (run,) = whole(wandb_server, 1)
    assert series(run, "train/mine") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert series(run, "rank-1/train/mine") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert series(run, "train/epoch") == {1: 0.125, 2: 0.25, 3: 0.375}
    assert all(loss < 2 for loss in series(run, "train/loss").values())


def test_each_rank_has_its_own_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    train(wandb_server, tmp_path, "new").check()
    assert sorted(series(run, "train/mine")[3] for run in whole(wandb_server, 2)) == [0.0, 1.0]
