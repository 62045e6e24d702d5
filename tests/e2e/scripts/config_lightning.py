"""A Trainer on two spawned ranks, each of which reads and writes the config of the logger's run."""

import json
import sys
from typing import Any

import torch
from fit_and_test import Model
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbLogger


class Reader(Model):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 2})

    @property
    def config(self) -> Any:
        assert isinstance(self.logger, DistWandbLogger)
        return self.logger.experiment.config

    def setup(self, stage: str) -> None:  # noqa: ARG002  # Lightning passes it
        assert self.config["lr"] == self.config.lr == 0.1
        if self.global_rank == 0:  # a value written on rank 1 is visible there until rank 0 sets it again
            self.trainer.strategy.barrier()
        self.config.update({"model": object(), "written": [1, 2]})
        if self.global_rank == 1:
            self.trainer.strategy.barrier()

    def on_train_start(self) -> None:
        assert self.config["written"] == [1, 2]
        if self.global_rank == 0:
            self.config["steps"] = 7
        self.trainer.strategy.barrier()

    def on_train_end(self) -> None:
        assert self.config["steps"] == 7
        sys.stdout.write(f"\nSAW {json.dumps(dict(self.config))}\n")


def main(directory: str) -> None:
    logger = DistWandbLogger(save_dir=directory, id="exp", offline=True, config={"lr": 0.1})
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp_spawn",
        devices=2,
        max_steps=2,
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Reader(), DataLoader(TensorDataset(torch.ones(4, 2))))
    logger.experiment.finish()


if __name__ == "__main__":
    main(sys.argv[1])
