"""A loop over folds with a run for each, whose `experiment` the script uses before `fit`, as with the stock logger."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from history import history_of
from lightning_trainers import Layer, samples, trainer_of_two
from processes import python, run_job
from stored import ended_runs

import dist_wandb as wandb
from dist_wandb import DistWandbLogger

FOLDS = {"good": [True], "failed": [False], "recovered": [False, True]}  # whether each stage succeeds


class Model(Layer):
    def __init__(self, *, succeeds: bool) -> None:
        super().__init__()
        self.succeeds = succeeds

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank)
        if batch_idx == 1 and not self.succeeds:
            raise ValueError("this stage fails")
        return super().training_step(batch, batch_idx)


def train_folds(strategy: str) -> None:
    """A run for each fold, on two ranks, used before the Trainer starts its processes."""
    for fold, stages in FOLDS.items():
        logger = DistWandbLogger(project="tests", id=fold, save_dir=".")
        logger.experiment.config.update({"fold": fold})
        for succeeds in stages:
            with suppress(Exception):  # ddp_spawn raises another class
                trainer_of_two(logger, strategy=strategy).fit(Model(succeeds=succeeds), samples(4))
        wandb.finish()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_finish_ends_the_run_of_a_fold_with_the_exit_code_of_its_last_stage(tmp_path: Path, strategy: str) -> None:
    run_job(*python(train_folds, strategy), cwd=tmp_path).check()
    runs = {run.run_id: run for run in ended_runs(tmp_path, 3)}
    assert {name: run.exit_code for name, run in runs.items()} == {"good": 0, "failed": 1, "recovered": 0}
    assert {name: run.config["fold"] for name, run in runs.items()} == {name: name for name in runs}
    assert history_of(runs["good"], "trainer/global_step").values("loss") == [5.0, 5.0]
