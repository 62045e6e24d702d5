"""A Trainer with everything that logs, and two of our loggers: every run has the rows of its ranks, each once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from history import History
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import WandbLogger
from processes import Finished, python, run_job
from stored import PATIENT
from torch.utils.data import DataLoader, TensorDataset
from wandb_server import WandbServer

X = "trainer/global_step"
STEPS, EPOCHS = 3, 2  # of an epoch, on each of two ranks; until EarlyStopping ends it: the monitored value is constant
LOSSES = [float(step) for _ in range(EPOCHS) for step in range(STEPS)]  # of rank 0; those of rank 1 are larger by 10
STAGES = ("train", "validate", "test")
DEVICE = "DeviceStatsMonitor.on_train_batch_end/cpu_vm_percent"


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
    given = {"name": "nm", "save_dir": directory, "project": "tests", "id": mode, "run_mode": mode, "log_model": "all"}
    device_stats = {"spread": ["DeviceStatsMonitor*"]} if mode == "shared" else {}
    return of("dist_wandb.DistWandbLogger", **given, **device_stats, limits={"heartbeat": PATIENT})


def train_everything(directory: str) -> None:
    """Lightning: fit, validate and test with callbacks that log, and several loggers, `DistWandbLogger` first."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    others = [of(f"lightning.pytorch.loggers.{kind}Logger", save_dir=directory) for kind in ("CSV", "TensorBoard")]
    callbacks = "lightning.pytorch.callbacks."
    trainer = {
        **quiet,
        "accelerator": "cpu",
        "strategy": "ddp_notebook",
        "devices": 2,
        "max_epochs": 5,
        "log_every_n_steps": 1,
        "logger": [*(logger_of(directory, mode) for mode in ("shared", "new")), *others],
        "callbacks": [
            of(f"{callbacks}LearningRateMonitor", logging_interval="step"),
            of(f"{callbacks}DeviceStatsMonitor", cpu_stats=True),
            of(f"{callbacks}ThroughputMonitor", batch_size_fn="builtins.len", window_size=2),
            of(f"{callbacks}ModelCheckpoint", monitor="val", save_last=True),
            of(f"{callbacks}EarlyStopping", monitor="val", patience=1),
            of(f"{callbacks}Timer", interval="step"),
        ],
    }
    wandb.setup()  # as W&B advises before a fork: all ranks inherit its process
    overwrite = {"overwrite": True}  # each stage saves the config again
    cli = LightningCLI(Model, args={"trainer": trainer}, run=False, save_config_kwargs=overwrite)
    cli.trainer.fit(cli.model)
    cli.trainer.validate(cli.model, verbose=False)
    cli.trainer.test(cli.model, verbose=False)


def check_rows(history: History, ranks: Sequence[int], prefix: str = "") -> None:
    """Check the rows of a run whose values are the mean over ranks: each value once, at its step."""
    rank = sum(ranks) / len(ranks)
    assert history.values(f"{prefix}loss") == [10.0 * rank + loss for loss in LOSSES]
    assert [row[X] for row in history.rows_with(f"{prefix}loss")] == list(range(STEPS * EPOCHS))
    assert history.values(f"{prefix}val") == [4.0 * rank + 1] * (EPOCHS + 1)
    assert history.values(f"{prefix}tested") == [10.0 * rank + 1]
    rates = [] if prefix else [0.1] * STEPS + [0.01] * STEPS  # equal on all ranks by nature, so without labels
    assert history.values(f"{prefix}lr-SGD") == pytest.approx(rates)
    assert not (prefix and history.values(f"{prefix}epoch"))
    assert len(history.values(f"{prefix}{DEVICE}")) == STEPS * EPOCHS
    assert not history.is_flagged
    if not prefix:  # ThroughputMonitor logs on rank 0 only
        assert len(history.values("train/batches")) == STEPS * EPOCHS * (0 in ranks)


def check_places(finished: Finished, directory: Path, run_id: str) -> None:
    """Check that all ranks agree on Lightning's directories, and that only rank 0 wrote there."""
    seen = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    assert sorted(fact["rank"] for fact in seen) == [0, 1]
    assert {fact["log_dir"] for fact in seen} == {str(directory)}
    (checkpoints,) = {fact["checkpoints"] for fact in seen}
    assert checkpoints == str(directory / "tests" / run_id / "checkpoints")
    assert {path.name for path in Path(checkpoints).iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt"}
    assert (directory / "config.yaml").is_file()
    assert list(directory.glob("lightning_logs/*/metrics.csv"))
    assert list(directory.glob("lightning_logs/*/events.out.tfevents*"))


def test_ddp_notebook_online_after_wandb_setup(wandb_server: WandbServer, tmp_path: Path) -> None:
    """Forked ranks inherit the process of wandb, which would refuse the second writer of a shared run."""
    job = python(train_everything, tmp_path)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    check_places(finished, tmp_path, "shared")
    assert {run.run_id for run in wandb_server.runs.values()} == {"shared", "new-rank-0", "new-rank-1"}
    for run_id, ranks in {"shared": [0, 1], "new-rank-0": [0], "new-rank-1": [1]}.items():
        run = wandb_server.run(run_id)
        assert run.exit_codes == [0] * len(STAGES)  # each stage has processes of its own
        check_rows(History(run.rows, X), ranks)
        assert (run.config["lr"], run.config["seen_by"]) == (0.1, ranks[0])
    shared = History(wandb_server.run("shared").rows, X)
    check_rows(shared, [0], "rank-0/")
    check_rows(shared, [1], "rank-1/")
    for kind in ("min", "max", "std", "argmax_rank"):  # the spread covers the devices of all ranks
        assert len(shared.values(f"{DEVICE}/{kind}")) == STEPS * EPOCHS
    for name in ("table", "text", "rank-1/table", "rank-1/text", "image", "rank-1/image"):
        assert len(shared.values(name)) == 1
    check_artifacts(wandb_server)


def check_artifacts(server: WandbServer) -> None:
    """Check that rank 0's runs have the checkpoints, and every run its own tables."""
    found: dict[tuple[str, str], int] = {}
    for artifact in server.artifacts:
        name = re.sub(r"(rank-1(table|text))-.+", r"\1", artifact.name)  # W&B changes names that contain a slash
        place = artifact.run.rpartition("/")[2], name
        found[place] = found.get(place, 0) + 1
    tables = {("shared", f"run-shared-{name}") for name in ("table", "text", "rank-1table", "rank-1text")}
    for rank in (0, 1):
        run_id = f"new-rank-{rank}"
        tables |= {(run_id, f"run-{run_id}-{name}") for name in ("table", "text")}
    models = {("shared", "model-shared"), ("new-rank-0", "model-new-rank-0")}
    assert set(found) == tables | models
    assert {place: found[place] for place in models} == dict.fromkeys(models, 2)  # the best one, and the last
