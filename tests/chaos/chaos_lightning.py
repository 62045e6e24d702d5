"""A random Lightning job: the Trainer starts the ranks, and each writes to its ledger what it logs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from chaos_rank import break_off
from drawing import Spec, from_json, value_of
from ledger import Ledger, watch_messages
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbLogger


class Model(LightningModule):
    """Logs one number per step."""

    def __init__(self, spec: Spec, directory: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.spec, self.directory = spec, directory
        self.ledger: Ledger | None = None

    def on_train_start(self) -> None:
        self.ledger = Ledger(self.directory, self.global_rank)
        watch_messages(self.ledger)
        self.ledger.write("opened", session=0)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        assert self.ledger is not None
        for fault in self.spec.faults_of(self.global_rank):
            if fault.row == batch_idx:
                break_off(self.ledger, fault)
        time.sleep(self.spec.lag(self.global_rank, batch_idx))
        value = value_of(self.global_rank, batch_idx)
        names = ["loss", *(["own_0"] if self.global_rank == 0 else [])]
        number = self.ledger.intend(0, dict.fromkeys(names, (batch_idx, value)), step=batch_idx)
        for name in names:
            self.log(name, value)
        self.ledger.done(number)
        result: torch.Tensor = self.layer(batch[0]).mean()
        return result

    def on_train_end(self) -> None:
        assert self.ledger is not None
        self.ledger.write("end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(spec_file: str, directory: str) -> None:
    spec = from_json(Path(spec_file).read_text())
    logger = DistWandbLogger(
        project="chaos",
        id="s0",
        save_dir=str(Path(directory) / "runs"),
        offline=os.environ.get("WANDB_MODE") == "offline",
        **spec.options,
    )
    trainer = Trainer(
        accelerator="cpu",
        strategy=spec.strategy if spec.world_size > 1 else "auto",
        devices=spec.world_size,
        max_steps=spec.rows,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(spec, Path(directory)), DataLoader(TensorDataset(torch.ones(spec.world_size * spec.rows, 2))))


if __name__ == "__main__":
    main(*sys.argv[1:])
