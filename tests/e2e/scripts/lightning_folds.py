"""`lightning_folds.py STRATEGY`: a run for each fold, on two ranks, used before the Trainer starts its processes."""

import sys
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import dist_wandb as wandb
from dist_wandb import DistWandbLogger

FOLDS = {"good": [True], "failed": [False], "recovered": [False, True]}  # whether each stage succeeds


class Model(LightningModule):
    def __init__(self, *, succeeds: bool) -> None:
        super().__init__()
        self.succeeds = succeeds
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank)
        if batch_idx == 1 and not self.succeeds:
            raise ValueError("this stage fails")
        return self.weight * batch[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    quiet: dict[str, Any] = dict.fromkeys(("enable_progress_bar", "enable_model_summary"), False)
    for fold, stages in FOLDS.items():
        logger = DistWandbLogger(project="tests", id=fold, save_dir=".")
        logger.experiment.config.update({"fold": fold})
        for succeeds in stages:
            trainer = Trainer(
                accelerator="cpu",
                devices=2,
                strategy=sys.argv[1],
                logger=logger,
                max_epochs=1,
                log_every_n_steps=1,
                enable_checkpointing=False,
                **quiet,
            )
            with suppress(Exception):  # ddp_spawn raises another class
                trainer.fit(Model(succeeds=succeeds), DataLoader(TensorDataset(torch.ones(4))))
        wandb.finish()
