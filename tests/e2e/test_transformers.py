"""The Hugging Face Trainer under torchrun, as its users write it."""

from __future__ import annotations

from pathlib import Path

import pytest
from history import History, history_of
from processes import clean_environment, run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "trainer_runs.py"


def train(directory: Path, number: int, *arguments: str) -> list[History]:
    """Train on two ranks; the histories of the runs."""
    mode, *rest = arguments
    job = torchrun(SCRIPT, mode, directory / "out", *rest)
    run_job(*job, cwd=directory, environment=clean_environment(WANDB_MODE="offline"), timeout=240).check()
    runs = ended_runs(directory, number)
    for run in runs:
        assert run.exit_code == 0
        assert run.config["hidden_size"] == 8
    return [history_of(run, "train/global_step") for run in runs]


@pytest.mark.parametrize("mode", ["auto", "name", "adopt"])
def test_own_numbers_are_means_and_those_of_the_trainer_stay(mode: str, tmp_path: Path) -> None:
    (history,) = train(tmp_path, 1, mode)
    assert history.last("train/mine") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert list(history.last("train/loss")) == [1, 2, 3]
    assert list(history.last("eval/loss")) == [2, 3]


def test_what_is_reduced_already_is_not_summed_again(tmp_path: Path) -> None:
    (history,) = train(tmp_path, 1, "auto", "sum")
    assert history.last("train/mine") == {1: 1.0, 2: 1.0, 3: 1.0}
    assert history.last("train/epoch") == {1: 0.125, 2: 0.25, 3: 0.375}
    assert all(loss < 2 for loss in history.last("train/loss").values())


def test_each_rank_has_a_run_of_its_own(tmp_path: Path) -> None:
    histories = train(tmp_path, 2, "new")
    assert sorted(history.last("train/mine")[3] for history in histories) == [0.0, 1.0]
