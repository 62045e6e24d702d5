"""Lightning on two ranks that fail once in the middle. After a restart, they continue from their checkpoint."""

import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor

from dist_wandb import DistWandbLogger

STEPS, FAILS_AT = 8, 4


class Failing(BoringModel):
    """Logs its step, and fails once: if it started without a checkpoint."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__()
        self._fails = fails

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self._fails and self.global_step == FAILS_AT:
            self.trainer.strategy.barrier()  # the first failure ends the other rank, maybe before it logs its row
            raise RuntimeError("as asked to")
        self.log("loss", 10.0 * self.global_rank + self.global_step)
        loss: Tensor = self.layer(batch).sum() * batch_idx
        return loss


def main(directory: str) -> None:
    checkpoint = Path(directory) / "checkpoints" / "last.ckpt"
    goes_on = checkpoint.exists()
    logger = DistWandbLogger(project="tests", save_dir=directory, offline=True, run_mode="new", resume="auto")
    if goes_on:
        sys.stdout.write(f"in the checkpoint {DistWandbLogger.id_in(checkpoint)}\n")
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        log_every_n_steps=1,
        limit_val_batches=0,
        logger=logger,
        callbacks=[ModelCheckpoint(checkpoint.parent, every_n_train_steps=FAILS_AT, save_last=True)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Failing(fails=not goes_on), ckpt_path=checkpoint if goes_on else None)
    sys.stdout.write(f"logged into {logger.version}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
