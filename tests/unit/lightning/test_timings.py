"""`DistWandbLogger(timings=True)`: the parts of a step in Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fakes import FakeWandb
from lightning.pytorch import LightningModule, Trainer
from lightning_trainers import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dist_wandb import ConfigurationError, DistWandbLogger

STEP = ["data", "forward", "backward", None, "optimizer"]


class Model(LightningModule):
    def __init__(self, *, fails: bool = False, is_manual: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.automatic_optimization = not is_manual
        self.fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss: Tensor = self.layer(batch).mean()
        if self.fails and batch_idx == 1:
            raise ArithmeticError
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        for _ in range(2):
            self.manual_backward(self.layer(batch).mean())
            optimizer.step()
        return None

    def validation_step(self, batch: Tensor) -> None:
        self.log("validated", self.layer(batch).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def fit(model: Model, out: Path, *, timings: bool = True, **arguments: Any) -> Trainer:
    data: Any = DataLoader(torch.ones(2, 2))  # type: ignore[arg-type]  # it accepts objects with a length and items
    trainer = quiet_trainer(DistWandbLogger(save_dir=out, timings=timings), **{"limit_val_batches": 0, **arguments})
    trainer.fit(model, data, data)
    return trainer


def test_rows_have_the_parts_of_the_preceding_steps(
    parts: list[str | None], fake_wandb: FakeWandb, tmp_path: Path
) -> None:
    trainer = fit(Model(), tmp_path)
    assert parts == [*STEP, *STEP, "data", None, None]  # the loader has no third batch; the epoch ends; the training
    assert trainer.callbacks == []  # type: ignore[attr-defined]  # public, but set elsewhere
    first, second = (row for row in fake_wandb.runs[0].rows if "loss" in row)
    names = {"time/data", "time/forward", "time/backward", "time/optimizer", "time/step", "time/busy"}
    assert names <= first.keys()
    assert names <= second.keys()
    assert first["time/step"] >= first["time/data"] + first["time/forward"] + first["time/backward"]


def test_without_timings_nothing_is_measured(parts: list[str | None], tmp_path: Path) -> None:
    fit(Model(), tmp_path, timings=False)
    assert parts == []
    with pytest.raises(ConfigurationError, match="timings='data' is neither True nor False"):
        DistWandbLogger(save_dir=tmp_path, timings="data")  # type: ignore[arg-type]


def test_validation_between_batches_is_not_measured(parts: list[str | None], tmp_path: Path) -> None:
    fit(Model(), tmp_path, limit_val_batches=1, val_check_interval=1)
    validated = [*STEP, "data", None]  # loading continues after it
    assert parts == [None, *validated, *validated, "data", None, None]  # the first is the sanity check


def test_accumulating_batches_have_no_optimizer_part(parts: list[str | None], tmp_path: Path) -> None:
    fit(Model(), tmp_path, accumulate_grad_batches=2)
    assert parts == [*STEP[:-1], *STEP, "data", None, None]


def test_manual_optimization_measures_several_passes_in_a_step(parts: list[str | None], tmp_path: Path) -> None:
    fit(Model(is_manual=True), tmp_path, limit_train_batches=1)
    again = ["backward", "forward", "optimizer"]
    assert parts == ["data", "forward", *again, *again, "data", None, None]


def test_an_exception_ends_the_measurement(parts: list[str | None], tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        fit(Model(fails=True), tmp_path)
    assert parts == [*STEP, "data", "forward", None]


def test_with_ddp_the_forward_pass_starts_after_the_copies_of_buffers(parts: list[str | None], tmp_path: Path) -> None:
    model = Model()
    with mock.patch.dict(os.environ):  # Lightning changes it
        try:
            fit(model, tmp_path, strategy="ddp", devices=1, limit_train_batches=1)
        finally:
            dist.destroy_process_group()
    assert parts == ["data", None, *STEP[1:], "data", None, None]
    assert not model._forward_pre_hooks
