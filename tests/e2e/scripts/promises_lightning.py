"""Lightning on two ranks whose logger calls differ: one Trainer after another, each with its own logger."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_trainers import Layer, trainer_of_two
from stored import PATIENT
from torch.utils.data import DataLoader

from dist_wandb import DistWandbLogger, Limits

Batches = list[list[float]]  # the values of each batch


def loader(batches: Batches) -> DataLoader[torch.Tensor]:
    return DataLoader([torch.tensor(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]


class Model(Layer):
    """Logs the mean of each batch of the data: `training` and `validation` contain batches by rank."""

    def __init__(
        self, training: Sequence[Batches], validation: Sequence[Batches] | None = None, guarded: bool = False
    ) -> None:
        super().__init__(inputs=1)
        self.training_batches, self.validation_batches = training, validation
        self.guarded = guarded

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return loader(self.training_batches[self.global_rank])

    def val_dataloader(self) -> Any:
        return loader(self.validation_batches[self.global_rank]) if self.validation_batches else []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
        size = len(batch)
        self.log("loss", batch.mean(), on_step=True, on_epoch=True, batch_size=size)
        if self.guarded:
            self.log(f"only_on_{self.global_rank}", float(batch_idx))
            if self.global_rank == 1:
                self.log("guarded", 10.0 + batch_idx)
        return super().training_step([batch[:, None]], batch_idx)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("val", batch.mean(), on_step=True, on_epoch=True, batch_size=len(batch))
        for reduction in ("sum", "min", "max"):
            self.log(reduction, batch.mean(), reduce_fx=reduction)
        self.log("synced", batch.mean(), reduce_fx="sum", sync_dist=True)


def fit(directory: Path, model: Model, *, epochs: int = 1, prefix: str = "") -> None:
    limits = Limits(heartbeat=PATIENT)
    logger = DistWandbLogger(
        save_dir=str(directory), id="exp", project="tests", offline=True, prefix=prefix, limits=limits
    )
    trainer_of_two(logger, max_epochs=epochs, num_sanity_val_steps=0, use_distributed_sampler=False).fit(model)
    logger.experiment.finish()


def guarded(directory: Path) -> None:
    batches = [[[2.0 * step + rank] * 4 for step in range(8)] for rank in (0, 1)]
    fit(directory, Model(batches, guarded=True))


def uneven(directory: Path) -> None:
    """Two epochs, with three validation batches on rank 0 and five on rank 1."""
    training: list[Batches] = [[[1.0, 1.0]] * 2] * 2
    validation: Batches = [[10.0 * index] for index in range(5)]
    fit(directory, Model(training, [validation[:3], validation]), epochs=2)


def weighted(directory: Path) -> None:
    """Rank 0: two samples of value 1, rank 1: one of value 3; in training in one batch, in validation in one each."""
    training: list[Batches] = [[[1.0, 1.0]], [[3.0]]]
    validation: list[Batches] = [[[1.0], [1.0]], [[3.0]]]
    fit(directory, Model(training, validation), prefix="fold")


SCENARIOS: tuple[Callable[[Path], None], ...] = (guarded, uneven, weighted)


def main(directory: str) -> None:
    for scenario in SCENARIOS:
        begin = time.monotonic()
        scenario(Path(directory) / scenario.__name__)
        sys.stdout.write(f"\nTOOK {scenario.__name__} {time.monotonic() - begin:.1f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
