"""Lightning: fit, validate and test with callbacks that log, and several loggers, `DistWandbLogger` first."""

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import wandb
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, TensorDataset

STEPS = 3  # of an epoch, on each of two ranks
EPOCHS = 2  # until EarlyStopping ends it: the monitored value is constant


class Model(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = torch.nn.Linear(2, 1)

    def on_fit_start(self) -> None:
        for logger in self.loggers:
            logger.log_hyperparams({"seen_by": self.global_rank})

    def on_train_epoch_end(self) -> None:
        if self.current_epoch:
            return
        for logger in self.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_image("image", [np.full((2, 2, 3), self.global_rank, dtype=np.uint8)], step=2)
                logger.log_table("table", columns=["rank"], data=[[self.global_rank]], step=2)
                logger.log_text("text", columns=["words"], data=[[f"of {self.global_rank}"]])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank + batch_idx)
        result: torch.Tensor = self.layer(batch[0]).mean()
        return result

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("val", 4.0 * self.global_rank + len(batch))

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("tested", 10.0 * self.global_rank + len(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(TensorDataset(torch.ones(2 * STEPS, 2)))

    val_dataloader = test_dataloader = train_dataloader

    def on_fit_end(self) -> None:
        trainer = self.trainer
        facts: dict[str, Any] = {"rank": self.global_rank, "log_dir": trainer.log_dir}
        facts["checkpoints"] = trainer.checkpoint_callback.dirpath  # type: ignore[union-attr]
        facts["versions"] = [logger.version for logger in self.loggers[:2]]
        sys.stdout.write(f"\nSAW {json.dumps(facts)}\n")


def of(class_path: str, **arguments: Any) -> dict[str, Any]:
    """A class and its arguments, as LightningCLI reads them."""
    return {"class_path": class_path, "init_args": arguments}


def logger_of(directory: str, mode: str) -> dict[str, Any]:
    offline = os.environ.get("WANDB_MODE") == "offline"
    given: dict[str, Any] = {
        "name": "nm",
        "save_dir": directory,
        "project": "tests",
        "id": mode,
        "offline": offline,
        "run_mode": mode,
    }
    given["limits"] = {"heartbeat": 4.0}  # as `stored.PATIENT`
    device_stats = {"spread": ["DeviceStatsMonitor*"]} if mode == "shared" else {}
    return of("dist_wandb.DistWandbLogger", **given, **device_stats, log_model=False if offline else "all")


def main(directory: str, strategy: str, *modes: str) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    others = [of(f"lightning.pytorch.loggers.{kind}Logger", save_dir=directory) for kind in ("CSV", "TensorBoard")]
    callbacks = "lightning.pytorch.callbacks."
    trainer = {
        **quiet,
        "accelerator": "cpu",
        "strategy": strategy,
        "devices": 1 if strategy == "auto" else 2,
        "max_epochs": 5,
        "log_every_n_steps": 1,
        "logger": [*(logger_of(directory, mode) for mode in modes), *others],
        "callbacks": [
            of(f"{callbacks}LearningRateMonitor", logging_interval="step"),
            of(f"{callbacks}DeviceStatsMonitor", cpu_stats=True),
            of(f"{callbacks}ThroughputMonitor", batch_size_fn="builtins.len", window_size=2),
            of(f"{callbacks}ModelCheckpoint", monitor="val", save_last=True),
            of(f"{callbacks}EarlyStopping", monitor="val", patience=1),
            of(f"{callbacks}Timer", interval="step"),
        ],
    }
    if strategy == "ddp_notebook":
        wandb.setup()  # as W&B advises before a fork: all ranks inherit its process
    overwrite = {"overwrite": True}  # each stage of ddp_spawn saves the config again
    cli = LightningCLI(Model, args={"trainer": trainer}, run=False, save_config_kwargs=overwrite)
    cli.trainer.fit(cli.model)
    if strategy != "ddp_spawn":  # whose processes take long to start
        cli.trainer.validate(cli.model, verbose=False)
    cli.trainer.test(cli.model, verbose=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
