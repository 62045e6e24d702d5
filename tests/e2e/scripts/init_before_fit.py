"""Lightning ddp: wandb's idiom, `init` before the Trainer has started its processes; then its logger reuses the run."""

import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from stored import PATIENT
from torch.utils.data import DataLoader, TensorDataset

import dist_wandb as wandb
from dist_wandb import DistWandbLogger, Limits

PAUSE = 2.0  # seconds; longer than the ranks wait for one that opens no session


class Model(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            time.sleep(PAUSE)
        self.log("rank", float(self.global_rank))
        loss: torch.Tensor = self.layer(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(directory: str) -> None:
    limits: Any = Limits(heartbeat=PATIENT, join_timeout=1.0)
    run = wandb.init(project="tests", config={"width": 3}, dir=directory, mode="offline", limits=limits)
    model = Model(wandb.config["width"])
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=1,
        logger=DistWandbLogger(checkpoint_name=f"model-{run.id}"),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(6, 2))))
    wandb.log({"after": trainer.global_rank + 1})
    wandb.finish()
    assert wandb.run is None, "finish has left the run open"


if __name__ == "__main__":
    main(*sys.argv[1:])
