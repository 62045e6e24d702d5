"""Lightning on two ranks whose logger calls differ: one Trainer after another, each with its own logger."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from stored import PATIENT
from torch.utils.data import DataLoader, Dataset

from dist_wandb import DistWandbLogger, Limits

Batches = list[list[float]]  # the values of each batch


class Values(Dataset[torch.Tensor]):
    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.batches[index])


def loader(batches: Batches) -> DataLoader[torch.Tensor]:
    return DataLoader(Values(batches), batch_size=None)


class Model(LightningModule):
    """Logs the mean of each batch of the data: `training` and `validation` contain batches by rank."""

    def __init__(
        self, training: Sequence[Batches], validation: Sequence[Batches] | None = None, guarded: bool = False
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.training_batches, self.validation_batches = training, validation
        self.guarded = guarded

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return loader(self.training_batches[self.global_rank])

    def val_dataloader(self) -> Any:
        return loader(self.validation_batches[self.global_rank]) if self.validation_batches else []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        size = len(batch)
        self.log("loss", batch.mean(), on_step=True, on_epoch=True, batch_size=size)
        if self.guarded:
            self.log(f"only_on_{self.global_rank}", float(batch_idx))
            if self.global_rank == 1:
                self.log("guarded", 10.0 + batch_idx)
        result: torch.Tensor = self.layer(batch[:, None]).mean()
        return result

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("val", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
        for reduction in ("sum", "min", "max"):
            self.log(reduction, batch.mean(), reduce_fx=reduction)
        self.log("synced", batch.mean(), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(directory: Path, model: Model, callbacks: list[Callback], prefix: str = "", **arguments: Any) -> None:
    limits = Limits(heartbeat=PATIENT)
    logger = DistWandbLogger(
        save_dir=str(directory), id="exp", project="tests", offline=True, prefix=prefix, limits=limits
    )
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        logger=logger,
        callbacks=callbacks,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model)
    logger.experiment.finish()


def throughput(directory: Path) -> None:
    batches = [[[2.0 * step + rank] * 4 for step in range(8)] for rank in (0, 1)]
    monitor = ThroughputMonitor(batch_size_fn=len, window_size=3)
    fit(directory, Model(batches), [monitor], max_epochs=1)


def guarded(directory: Path) -> None:
    batches = [[[2.0 * step + rank] * 4 for step in range(8)] for rank in (0, 1)]
    fit(directory, Model(batches, guarded=True), [], max_epochs=1)


def uneven(directory: Path) -> None:
    """Two epochs, with three validation batches on rank 0 and five on rank 1."""
    training: list[Batches] = [[[1.0, 1.0]] * 2] * 2
    validation: Batches = [[10.0 * index] for index in range(5)]
    fit(directory, Model(training, [validation[:3], validation]), [], max_epochs=2)


def weighted(directory: Path) -> None:
    """Rank 0: two samples of value 1, rank 1: one of value 3; in training in one batch, in validation in one each."""
    training: list[Batches] = [[[1.0, 1.0]], [[3.0]]]
    validation: list[Batches] = [[[1.0], [1.0]], [[3.0]]]
    fit(directory, Model(training, validation), [], prefix="fold", max_epochs=1)


SCENARIOS: tuple[Callable[[Path], None], ...] = (guarded, uneven, weighted, throughput)


def main(directory: str) -> None:
    for scenario in SCENARIOS:
        begin = time.monotonic()
        scenario(Path(directory) / scenario.__name__)
        sys.stdout.write(f"\nTOOK {scenario.__name__} {time.monotonic() - begin:.1f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
