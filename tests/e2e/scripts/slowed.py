"""Ranks that train with a framework and ``timings=True``, one of which needs longer for each batch: FRAMEWORK OUT."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

ROWS = 26  # a rank is named by 20 at the earliest
SLOW = 0  # ddp copies its buffers: who waits for that is not busy
SECONDS = {True: 0.15, False: 0.03}  # for a batch: so much apart that a busy machine does not make up for it


class Read(Dataset[Tensor]):
    """Samples that take their time; one is a batch."""

    def __len__(self) -> int:
        return ROWS * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SECONDS[int(os.environ["RANK"]) == SLOW])
        return torch.full((2,), float(index))


def lightning(out: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from dist_wandb import DistWandbLogger

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(torch.nn.BatchNorm1d(2, momentum=None), torch.nn.Linear(2, 1)).eval()

        def training_step(self, batch: Tensor) -> Tensor:
            loss: Tensor = self.model.eval()(batch).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        log_every_n_steps=1,
        logger=DistWandbLogger("slowed", save_dir=out, timings=True),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(Read()))


if __name__ == "__main__":
    {"lightning": lightning}[sys.argv[1]](sys.argv[2])
