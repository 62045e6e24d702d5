"""One Lightning ddp job of two processes that says how long the logger took to open its run, on each rank."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbLogger


def timed(kind: type[WandbLogger]) -> type[WandbLogger]:
    """The same logger, saying how long the first use of its `experiment` takes."""

    class Timed(kind):  # type: ignore[valid-type,misc]  # made from either logger
        said = False

        @property
        def experiment(self) -> Any:
            start = time.perf_counter()
            run = super().experiment
            if not self.said:
                self.said = True
                sys.stdout.write(f"OPENED {time.perf_counter() - start:.6f}\n")
                sys.stdout.flush()
            return run

    return Timed


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        result: torch.Tensor = self.layer(batch[0]).mean() + batch_idx
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(logger: str, directory: str) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    kind = timed(DistWandbLogger if logger == "dist_wandb" else WandbLogger)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=1,
        logger=kind(project="startup", save_dir=directory, offline=True),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(4, 2))))


if __name__ == "__main__":
    main(*sys.argv[1:])
