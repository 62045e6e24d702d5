"""Trainers and a module of Lightning on the CPU, without output, and a process that looks like one of two ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    import pytest


def quiet_trainer(logger: Any, **arguments: Any) -> Trainer:
    """Return a Trainer of one epoch that logs each step, and saves no checkpoint unless `arguments` say so."""
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    short = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "log_every_n_steps": 1}
    return Trainer(logger=logger, **{**silent, **short, **arguments})


def trainer_of_two(logger: Any, **arguments: Any) -> Trainer:
    """Return such a Trainer that starts the second rank with ddp, unless `arguments` say otherwise."""
    return quiet_trainer(logger, **{"strategy": "ddp", "devices": 2, **arguments})


class Layer(LightningModule):
    """A module of one layer, which is trained to return small numbers."""

    def __init__(self, inputs: int = 2, outputs: int = 1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002  # Lightning passes it
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(number: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return batches of one sample each for a `Layer`."""
    return DataLoader(TensorDataset(torch.ones(number, 2)))


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Set the variables that a launcher of two processes sets. They name the job, so no store is needed."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for variable, value in {**ranks, "PMIX_NAMESPACE": "prterun-1"}.items():
        monkeypatch.setenv(variable, str(value))
