"""Lightning online: ranks that inherit a run by a fork. For ddp see test_real_runs.py."""

from __future__ import annotations

from pathlib import Path

import torch
import wandb
from lightning_trainers import Layer, samples, trainer_of_two
from processes import python, run_job
from stored import PATIENT, ROWS
from wandb_server import WandbServer

from dist_wandb import DistWandbLogger, Limits


class Model(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank + batch_idx)
        assert bool(wandb.run) is (self.global_rank == 0)  # elsewhere a stand-in
        wandb.log({"by_wandb": float(self.global_rank)})
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
    model = Model()
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
