"""Ranks that train with Lightning and ``timings=True``, one of which takes longer for each batch: OUT."""

from __future__ import annotations

import os
import sys
import time

import torch
from lightning.pytorch import LightningModule
from lightning_trainers import trainer_of_two
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dist_wandb import DistWandbLogger

ROWS = 26  # a rank is named after 20 at the earliest
SLOW = 0  # ddp copies its buffers: a rank that waits for that is not busy
SECONDS = {True: 0.15, False: 0.03}  # for a batch: a difference that a busy machine does not hide


class Read(Dataset[Tensor]):
    """Samples that take some time; each is a batch."""

    def __len__(self) -> int:
        return ROWS * int(os.environ["WORLD_SIZE"])

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SECONDS[int(os.environ["RANK"]) == SLOW])
        return torch.full((2,), float(index))


class Model(torch.nn.Module):
    """A module with buffers, which ddp copies before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2, momentum=None)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(self.norm.eval()(x)).mean()  # one sample has no variance
        return loss


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main(out: str) -> None:
    logger = DistWandbLogger("slowed", save_dir=out, timings=True)
    trainer_of_two(logger, devices=int(os.environ["WORLD_SIZE"])).fit(Module(), DataLoader(Read()))


if __name__ == "__main__":
    main(sys.argv[1])
