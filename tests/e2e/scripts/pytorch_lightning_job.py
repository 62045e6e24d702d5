"""`pytorch_lightning` without `lightning`, on two ranks: uneven loaders, timings and a checkpoint."""

# ruff: noqa: E402, I001  # the order of imports is what is tested
import json
import sys
from pathlib import Path
from typing import Any

for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    del sys.modules[name]  # of a warm interpreter
sys.modules["lightning"] = None  # type: ignore[assignment]  # as if it were not installed

import torch
from torch.utils.data import DataLoader

from dist_wandb import DistWandbLogger, Limits  # before Lightning, as sorted imports are

import pytorch_lightning as pl
from pytorch_lightning.loggers import WandbLogger
from pytorch_lightning.loggers.logger import DummyExperiment

BATCHES = [[[0.0, 0.0, 0.0], [0.0]], [[6.0, 6.0]]]  # of the ranks: the mean over all samples is 2


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002  # Lightning passes it
        self.log("trained", 10.0 * self.global_rank)
        return self.weight * batch.mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("validated", batch.mean(), batch_size=len(batch))

    def on_fit_start(self) -> None:
        logger: Any = self.logger
        facts = {
            "is stock": isinstance(logger, WandbLogger) and isinstance(logger, DistWandbLogger),
            "is dummy": isinstance(logger.experiment, DummyExperiment),
            "id": logger.experiment.id,
        }
        sys.stdout.write(f"\nSAW {json.dumps([self.global_rank, facts])}\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(4, 1))  # type: ignore[arg-type]  # it accepts objects with a length and items

    def val_dataloader(self) -> Any:
        return DataLoader([torch.tensor(batch) for batch in BATCHES[self.global_rank]], batch_size=None)  # type: ignore[arg-type]


def main(directory: Path) -> None:
    logger = DistWandbLogger(save_dir=directory, project="tests", id="exp", timings=True, limits=Limits(heartbeat=4.0))
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp_spawn",
        devices=2,
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    if trainer.global_rank == 0:
        (path,) = (directory / "tests" / "exp" / "checkpoints").iterdir()
        sys.stdout.write(f"\nID IN CHECKPOINT {DistWandbLogger.id_in(path)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
