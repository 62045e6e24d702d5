"""A random Lightning job: the Trainer starts the ranks, and each writes to its ledger what it logs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from chaos_rank import break_off
from drawing import Spec, draw, value_of
from ledger import Ledger, watch_messages
from lightning_trainers import Layer, quiet_trainer, samples

from dist_wandb import DistWandbLogger


class Model(Layer):
    def __init__(self, spec: Spec, directory: Path) -> None:
        super().__init__()
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
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        assert self.ledger is not None
        self.ledger.write("end")


def main(seed: str, directory: str) -> None:
    spec = draw(int(seed))
    logger = DistWandbLogger(
        project="chaos",
        id="s0",
        save_dir=str(Path(directory) / "runs"),
        offline=os.environ.get("WANDB_MODE") == "offline",
        **spec.options,
    )
    strategy = spec.strategy if spec.world_size > 1 else "auto"
    trainer = quiet_trainer(logger, strategy=strategy, devices=spec.world_size, max_steps=spec.rows, max_epochs=None)
    trainer.fit(Model(spec, Path(directory)), samples(spec.world_size * spec.rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
