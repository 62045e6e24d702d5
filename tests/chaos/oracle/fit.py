"""Fixed trainings with Lightning, by its own logger on one device, or by ours on two: WHICH DIRECTORY."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning_trainers import quiet_trainer
from torch.utils.data import DataLoader, TensorDataset

NAMES = ("epochs", "experiment")
RANKS = 2


class Model(LightningModule):
    """Logs as people do; rank 1 is late now and then."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layer = torch.nn.Linear(2, 1)

    def on_fit_start(self) -> None:
        if self.name == "experiment":
            self.logger.watch(self, log_freq=3, log_graph=False)  # type: ignore[union-attr]  # of both loggers

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).pow(2).mean()
        if batch_idx == 1 and self.global_rank == 1:
            time.sleep(0.15)
        if self.name == "epochs":
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            if batch_idx % 2 == 0 and self.logger is not None:
                self.logger.log_metrics({"own": batch_idx + 0.5}, step=self.global_step)
        else:
            self._log_by_experiment(loss, batch_idx)
        return loss

    def _log_by_experiment(self, loss: torch.Tensor, batch_idx: int) -> None:
        assert self.logger is not None
        run: Any = self.logger.experiment  # type: ignore[attr-defined]  # of both loggers
        self.log("loss", loss)
        if batch_idx == 0:
            run.define_metric("direct", summary="max")
        run.log({"direct": batch_idx / 4, "note": f"batch {batch_idx}"})
        if batch_idx == 1:
            run.log({"open": 1}, commit=False)  # the logger's row ends it
        if batch_idx == 2:
            run.log({"part": 1}, commit=False)
            run.log({"rest": 2})
            run.summary["best"] = 0.25
            run.config.update({"found": {"lr": 0.5}}, allow_val_change=True)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def fit(name: str, logger: Any, *, is_stock: bool) -> None:
    data = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), batch_size=2)
    trainer = quiet_trainer(
        logger,
        strategy="auto" if is_stock else "ddp_spawn",
        devices=1 if is_stock else RANKS,
        max_epochs=2,
        callbacks=[LearningRateMonitor()] if name == "epochs" else [],
        use_distributed_sampler=False,  # the same batches on each rank
    )
    trainer.fit(Model(name), data, data)


def main(which: str, directory: str) -> None:
    for name in NAMES:
        torch.manual_seed(0)
        arguments: dict[str, Any] = {"project": "oracle", "id": name, "save_dir": directory, "offline": True}
        if which == "stock":
            import wandb
            from lightning.pytorch.loggers import WandbLogger

            logger: Any = WandbLogger(**arguments)
        else:
            from dist_wandb import DistWandbLogger

            logger = DistWandbLogger(**arguments)
        logger.log_hyperparams({"lr": 0.1, "layers": [2, 1]})
        fit(name, logger, is_stock=which == "stock")
        if which == "stock":
            wandb.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
