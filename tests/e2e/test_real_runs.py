"""Runs that are opened before or after others usually are, with real processes and wandb.

For all modes see test_hosts.py and test_launchers.py, for Lightning on two nodes test_patterns.py, with other
strategies test_lightning_everything.py.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wandb as stock
from history import history_of
from lightning_trainers import Layer, samples, trainer_of_two
from processes import python, run_job, torchrun
from stored import PATIENT, ROWS, ended_runs
from wandb_server import WandbServer

import dist_wandb
import dist_wandb as wandb
from dist_wandb import DistWandbLogger, Limits

PAUSE = 2.0  # seconds; longer than the ranks wait for one that opens no session


def meet_late(directory: str) -> None:
    """Under torchrun, rank 0 opens its run before there is a process group, the others after."""
    comes_early = os.environ["RANK"] == "0"
    if not comes_early:
        dist.init_process_group("gloo")
    run = dist_wandb.init("tests", run_mode="shared", dir=directory, limits=dist_wandb.Limits(join_timeout=40))
    if comes_early:
        dist.init_process_group("gloo")
    sys.stdout.write(f"\nSAW {run.id}\n")
    dist.barrier()
    run.finish()
    dist.destroy_process_group()


class Model(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            time.sleep(PAUSE)
        self.log("rank", float(self.global_rank))
        return super().training_step(batch, batch_idx)


def init_before_fit(directory: str) -> None:
    """Use wandb's idiom: `init` before the Trainer has started its processes; then its logger reuses the run."""
    limits: Any = Limits(heartbeat=PATIENT, join_timeout=1.0)
    run = wandb.init(project="tests", config={"width": 3}, dir=directory, mode="offline", limits=limits)
    model = Model(outputs=wandb.config["width"])
    trainer = trainer_of_two(DistWandbLogger(checkpoint_name=f"model-{run.id}"))
    trainer.fit(model, samples(6))
    wandb.log({"after": trainer.global_rank + 1})
    wandb.finish()
    assert wandb.run is None, "finish has left the run open"


def test_ranks_share_a_run_before_and_after_their_process_group(tmp_path: Path) -> None:
    finished = run_job(*torchrun(meet_late, tmp_path), cwd=tmp_path).check()
    (run_id,) = {stored.run_id for stored in ended_runs(tmp_path, 2)}
    assert finished.lines("SAW ") == [f"SAW {run_id}"] * 2


def test_lightning_after_an_init_before_fit_has_that_run_alone(tmp_path: Path) -> None:
    finished = run_job(*python(init_before_fit, tmp_path), cwd=tmp_path).check()
    (stored,) = ended_runs(tmp_path, 1)
    history = history_of(stored, "trainer/global_step")
    assert (history.values("rank"), history.values("after")) == ([0.5] * 3, [1.5])
    assert (stored.config["width"], history.is_flagged) == (3, False)
    assert "Traceback" not in finished.output
    assert not [line for line in finished.lines("dist_wandb: ") if "run_mode=auto" not in line]


# --- ranks that inherit a run by a fork -------------------------------------------------------------------------------


class Forked(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank + batch_idx)
        assert bool(stock.run) is (self.global_rank == 0)  # elsewhere a stand-in
        stock.log({"by_wandb": float(self.global_rank)})
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("tested", 10.0 * self.global_rank + len(batch))


def fit_and_test(directory: str) -> None:
    """Lightning: fit, then test, in forked ranks."""
    data = samples(2 * ROWS)
    logger = DistWandbLogger("nm", directory, "exp", project="tests", limits=Limits(heartbeat=PATIENT))
    logger.log_hyperparams({"lr": 0.1})
    _ = logger.experiment  # a run that the forked ranks inherit
    trainer = trainer_of_two(logger, strategy="ddp_fork")
    model = Forked()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    logger.experiment.finish()


def test_fit_and_test_of_forked_ranks_are_one_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = python(fit_and_test, tmp_path)
    run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    run = wandb_server.run("exp")
    assert (run.completions, run.exit_codes) == (1, [0])
    assert (run.display_name, run.config) == ("nm", {"lr": 0.1})
    expected = {
        "loss": [5.0 + step for step in range(ROWS)],  # of 10 * rank + step
        "tested": [6.0],  # of 10 * rank + 1
        "by_wandb": [0.5] * ROWS,  # wandb's own functions do not reach the run that rank 1 has inherited
    }
    assert {name: [row[name] for row in run.rows if name in row] for name in expected} == expected


# --- a run for each fold, whose `experiment` the script uses before `fit`, as with the stock logger -------------------

FOLDS = {"good": [True], "failed": [False], "recovered": [False, True]}  # whether each stage succeeds


class Fold(Layer):
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
                trainer_of_two(logger, strategy=strategy).fit(Fold(succeeds=succeeds), samples(4))
        wandb.finish()


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_finish_ends_the_run_of_a_fold_with_the_exit_code_of_its_last_stage(tmp_path: Path, strategy: str) -> None:
    run_job(*python(train_folds, strategy), cwd=tmp_path).check()
    runs = {run.run_id: run for run in ended_runs(tmp_path, 3)}
    assert {name: run.exit_code for name, run in runs.items()} == {"good": 0, "failed": 1, "recovered": 0}
    assert {name: run.config["fold"] for name, run in runs.items()} == {name: name for name in runs}
    assert history_of(runs["good"], "trainer/global_step").values("loss") == [5.0, 5.0]
