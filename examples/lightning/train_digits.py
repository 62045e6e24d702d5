"""Classify handwritten digits with PyTorch Lightning, logging through `DistWandbLogger`.

    python train_digits.py                                                   # one process
    python train_digits.py --strategy ddp --devices 2                        # two processes, one run
    python train_digits.py --strategy ddp --devices 2 --run-mode shared      # two processes that write into one run
    python train_digits.py --strategy ddp_spawn --devices 2 --run-mode new   # two processes, a run for each, grouped

On GPUs, add ``--accelerator gpu``. On several nodes, start it on each of them with ``--num-nodes``, under torchrun,
under SLURM, or with ``MASTER_ADDR``, ``MASTER_PORT`` and ``NODE_RANK`` set.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from dist_wandb import DistWandbLogger


class DigitClassifier(LightningModule):
    def __init__(self, epochs: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.epochs = epochs
        self.lr = lr
        self.model = nn.Sequential(
            nn.Unflatten(1, (1, 8)),
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
        # Lightning computes torchmetrics objects at the end of the epoch, over the samples of all ranks.
        self.log_dict({"val/loss": self.val_loss, "val/accuracy": self.val_accuracy})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=self.epochs)]


def main() -> None:
    args = parse_args()
    mode = mode_without_login()
    seed_everything(0)
    logger = DistWandbLogger(
        project=args.project,
        name=args.name,
        save_dir=args.log_dir,
        mode=mode,
        run_mode=args.run_mode,
        rank_scope=args.rank_scope,
    )
    trainer = Trainer(
        accelerator=args.accelerator,
        strategy=args.strategy,
        devices=args.devices,
        num_nodes=args.num_nodes,
        max_epochs=args.epochs,
        log_every_n_steps=5,
        logger=logger,
        callbacks=[LearningRateMonitor()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if mode == "offline" and trainer.is_global_zero:
        print("W&B has no API key, so it writes to disk only. To upload as you train, run `wandb login`.", flush=True)

    train, val = load_data()
    model = DigitClassifier(args.epochs, args.lr)
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=32))
    logger.experiment.finish()

    if trainer.is_global_zero:
        print(f"\nValidation accuracy: {trainer.callback_metrics['val/accuracy']:.3f}")
        print_where(args.log_dir, args.run_mode, trainer.world_size)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The 1797 images of 8x8 pixels that come with scikit-learn, for training and validation."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, val = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[val], labels[val])


def mode_without_login() -> str | None:
    """`"offline"` if W&B was given neither a mode nor an API key; else `None`, which leaves the choice to W&B."""
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()  # where `wandb login` keeps the key
    hosts = netrc.read_text() if netrc.exists() else ""
    has_key = os.environ.get("WANDB_API_KEY") or "wandb" in hosts or "coreweave" in hosts
    return None if has_key or os.environ.get("WANDB_MODE") else "offline"


def print_where(log_dir: Path, run_mode: str, world_size: int) -> None:
    """Print where the runs are, how to view them, and how to upload those that were written offline."""
    one_folder = run_mode == "auto" or world_size == 1
    print(f"\nThe runs are in {log_dir}. Look at them with")
    print(f"    dist-wandb show {log_dir}")
    print(f"    wandb leet {log_dir / ('wandb' if one_folder else 'wandb/rank-0/wandb')}")
    print("Upload those that were written offline with")
    print(f"    dist-wandb sync {log_dir}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--accelerator", default="cpu", help="as in Trainer")
    parser.add_argument("--strategy", default="auto", help="as in Trainer: ddp, ddp_spawn, ...")
    parser.add_argument("--devices", type=int, default=1, help="processes on each node")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes")
    parser.add_argument("--run-mode", default="auto", choices=["auto", "shared", "new"], help="which ranks open a run")
    parser.add_argument("--rank-scope", default="global", choices=["global", "worker"], help="unit: the job, or a node")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--project", default="digits", help="W&B project")
    parser.add_argument("--name", default="lightning", help="display name of the run")
    parser.add_argument("--log-dir", type=Path, default="runs", help="where the runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
