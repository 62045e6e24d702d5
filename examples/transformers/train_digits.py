"""Classify handwritten digits with the Hugging Face Trainer, logging through `DistWandbCallback`.

    python train_digits.py                                          # one process
    torchrun --nproc_per_node 2 train_digits.py                     # two processes, one run
    torchrun --nproc_per_node 2 train_digits.py --run-mode shared   # two processes that write into one run
    torchrun --nproc_per_node 2 train_digits.py --run-mode new      # two processes, a run for each, grouped

The Trainer itself reduces its loss and the metrics of evaluations over ranks. The accuracy on training batches is
computed by each rank on its own; the run has the mean over all ranks.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed

from dist_wandb import DistWandbCallback


def main() -> None:
    args = parse_args()
    mode = mode_without_login()
    arguments = TrainingArguments(
        str(args.log_dir / "checkpoints"),
        report_to="none",  # Hugging Face's own callback would record the training a second time
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        run_name=args.name,
    )
    if mode == "offline" and arguments.process_index == 0:
        print("W&B has no API key, so it writes to disk only. To upload as you train, run `wandb login`.")
    set_seed(0)
    train_data, val_data = load_data()
    trainer = DigitsTrainer(
        model=Digits(),
        args=arguments,
        data_collator=batch_of,
        train_dataset=train_data,
        eval_dataset=val_data,
        compute_metrics=accuracy,
        callbacks=[
            DistWandbCallback(
                args.project, dir=args.log_dir, mode=mode, run_mode=args.run_mode, rank_scope=args.rank_scope
            )
        ],
    )
    trainer.train()
    if arguments.process_index == 0:
        print_where(args.log_dir, args.run_mode, arguments.world_size)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class DigitsTrainer(Trainer):
    """Also logs the accuracy on this rank's own training samples."""

    right = seen = 0

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        if model.training:
            self.right += int((outputs["logits"].argmax(-1) == inputs["labels"]).sum())
            self.seen += len(inputs["labels"])
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.seen:
            logs["accuracy"] = self.right / self.seen
            self.right = self.seen = 0
        super().log(logs, *args, **kwargs)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(np.argmax(prediction.predictions, -1) == prediction.label_ids))}


def batch_of(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pixels, labels = zip(*samples, strict=True)
    return {"pixels": torch.stack(pixels), "labels": torch.stack(labels)}


def load_data() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, val = order[:1437], order[1437:]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[val], labels[val])


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
    parser.add_argument("--run-mode", default="auto", choices=["auto", "shared", "new"], help="which ranks open a run")
    parser.add_argument("--rank-scope", default="global", choices=["global", "worker"], help="unit: the job, or a node")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=5e-3, help="largest learning rate")
    parser.add_argument("--project", default="digits", help="W&B project")
    parser.add_argument("--name", default="transformers", help="display name of the run")
    parser.add_argument("--log-dir", type=Path, default="runs", help="where the runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
