"""Handwritten digits with PyTorch Lightning and `DistWandbLogger`.

    python train_digits.py                                                   # one process
    python train_digits.py --devices 2 --strategy ddp                        # two processes, one W&B run
    python train_digits.py --devices 2 --strategy ddp --run-mode shared      # two processes write into one run
    python train_digits.py --devices 2 --strategy ddp_spawn --run-mode new   # a run for each process, grouped

On several nodes, start it on each of them with ``--num-nodes`` and the usual variables of Lightning (``MASTER_ADDR``,
``MASTER_PORT``, ``NODE_RANK``), or under torchrun or SLURM. On GPUs, add ``--accelerator gpu``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from dist_wandb import DistWandbLogger


class Digits(L.LightningDataModule):
    """The 1797 images of 8x8 pixels that come with scikit-learn."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
        data = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.val = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, lr: float = 5e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.val_loss = MeanMetric()
        self.val_accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self.model(images)
        self.val_loss.update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
        self.val_accuracy.update(logits, labels)
        # torchmetrics objects bring the ranks together at the end of the epoch: these are the values over all ranks.
        self.log_dict({"val/loss": self.val_loss, "val/accuracy": self.val_accuracy})

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = parse_args()
    L.seed_everything(0)
    mode = wandb_mode()
    logger = DistWandbLogger(
        project=args.project,
        name=args.name,
        save_dir=args.log_dir,
        mode=mode,
        run_mode=args.run_mode,
        rank_scope=args.rank_scope,
    )
    trainer = L.Trainer(
        accelerator=args.accelerator,
        strategy=args.strategy,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=args.epochs,
        logger=logger,
        callbacks=[LearningRateMonitor()],
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), Digits())
    logger.experiment.finish()


def wandb_mode() -> str | None:
    """`WANDB_MODE`, if it is set; else offline, unless W&B knows an API key (`wandb login` keeps it in netrc)."""
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    has_key = os.environ.get("WANDB_API_KEY") or (netrc.exists() and "wandb" in netrc.read_text())
    return os.environ.get("WANDB_MODE") or (None if has_key else "offline")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--strategy", default="auto", help="ddp, ddp_spawn, ... (default: auto)")
    parser.add_argument("--devices", type=int, default=1, help="processes on each node (default: 1)")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--run-mode", default="auto", help="which ranks open a W&B run: auto, shared or new")
    parser.add_argument("--rank-scope", default="global", help="one unit is the whole job (global) or a node (worker)")
    parser.add_argument("--project", default="digits")
    parser.add_argument("--name", default="lightning", help="display name of the run")
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="where W&B's files go (default: ./runs)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
