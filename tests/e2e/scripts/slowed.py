"""Ranks that train with a framework and ``timings=True``, one of which takes longer for each batch: FRAMEWORK OUT."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

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


def lightning(out: str) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from dist_wandb import DistWandbLogger

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
    trainer.fit(Module(), DataLoader(Read()))


def accelerate(out: str) -> None:
    from accelerate import Accelerator

    from dist_wandb import DistWandbTracker

    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(timings=True, dir=out))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Read()))
    accelerator.init_trackers("slowed")
    for step, batch in enumerate(loader):
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()


def transformers(out: str) -> None:
    from transformers import Trainer, TrainingArguments

    from dist_wandb import DistWandbCallback

    arguments = TrainingArguments(
        out,
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    callback = DistWandbCallback(timings=True, dir=out)

    class WithLoss(Trainer):  # type: ignore[misc]  # its base class is not typed
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(inputs["x"])

    trainer = WithLoss(
        Model(), arguments, train_dataset=Read(), callbacks=[callback], data_collator=lambda one: {"x": one[0][None]}
    )
    trainer.train()


if __name__ == "__main__":
    {"lightning": lightning, "accelerate": accelerate, "transformers": transformers}[sys.argv[1]](sys.argv[2])
