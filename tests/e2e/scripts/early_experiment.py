"""Lightning ddp: `logger.experiment` is used before the Trainer has started its processes."""

import sys

import fit_and_test
import torch
from lightning.pytorch import Trainer
from stored import PATIENT
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbLogger, Limits


def main(directory: str) -> None:
    logger = DistWandbLogger(
        name="nm",
        save_dir=directory,
        project="tests",
        config={"bias": True},
        tags=["a"],
        group="g",
        job_type="train",
        offline=True,
        limits=Limits(heartbeat=PATIENT),
    )
    logger.experiment.config.update({"lr": 0.1})
    logger.log_hyperparams({"width": 8})
    run = logger.experiment
    about = [run.id, run.project, run.name, run.group, run.tags, run.job_type, run.path, run.dir]
    seen = [run.config["lr"], run.config.get("width", 1), bool(run.config["bias"]), run.config.get("depth", 3), *about]
    sys.stdout.write(f"EARLY {seen}\n")
    sys.stdout.flush()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(fit_and_test.Model(), DataLoader(TensorDataset(torch.ones(6, 2))))


if __name__ == "__main__":
    main(*sys.argv[1:])
