"""Classify handwritten digits with Hugging Face Accelerate, logging through `DistWandbTracker`.

    python train_digits.py                                            # one process
    accelerate launch --multi_gpu --num_processes 2 train_digits.py   # two processes, one run
    torchrun --nproc_per_node 2 train_digits.py                       # the same
    torchrun --nproc_per_node 2 train_digits.py --run-mode shared     # two processes that write into one run
    torchrun --nproc_per_node 2 train_digits.py --run-mode new        # two processes, a run for each, grouped

GPUs are used if there are any, one for each process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbTracker


def main() -> None:
    args = parse_args()
    mode = mode_without_login()
    tracker = DistWandbTracker(
        name=args.name,
        dir=args.log_dir,
        mode=mode,
        run_mode=args.run_mode,
        rank_scope=args.rank_scope,
    )
    # On a machine without a GPU, Accelerate joins the processes of a job only if it is told to use the CPU.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available(), log_with=tracker)
    if mode == "offline":
        accelerator.print("W&B has no API key, so it writes to disk only. To upload as you train, run `wandb login`.")
    accelerator.init_trackers(args.project, config={"epochs": args.epochs, "lr": args.lr})
    train(accelerator, args.epochs, args.lr)
    accelerator.end_training()
    if accelerator.is_main_process:
        print_where(args.log_dir, args.run_mode, accelerator.num_processes)


def train(accelerator: Accelerator, epochs: int, lr: float) -> None:
    set_seed(0)
    train_data, val_data = load_data()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    scheduler = CosineAnnealingLR(optimizer, epochs)  # not prepared: Accelerate would step it once per process
    model, optimizer, train_loader, val_loader = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train_data, batch_size=32, shuffle=True),
        DataLoader(val_data, batch_size=32),
    )

    step = 0
    for epoch in range(epochs):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 5 == 0:
                values = {"train/loss": loss, "lr": scheduler.get_last_lr()[0], "epoch": epoch}
                accelerator.log(values, step=step)
        scheduler.step()
        val_loss, val_accuracy = evaluate(accelerator, model, val_loader)
        accelerator.log({"val/loss": val_loss, "val/accuracy": val_accuracy, "epoch": epoch}, step=step)
        accelerator.print(f"epoch {epoch}: validation loss {val_loss:.3f}, accuracy {val_accuracy:.3f}")


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]]
) -> tuple[float, float]:
    """Mean loss and accuracy over the samples of all ranks."""
    model.eval()
    losses, hits = [], []
    for images, labels in loader:
        logits = model(images)
        # gather_for_metrics drops the samples that Accelerate repeats to give all ranks the same number.
        loss, hit = accelerator.gather_for_metrics(
            (nn.functional.cross_entropy(logits, labels, reduction="none"), logits.argmax(dim=1) == labels)
        )
        losses.append(loss)
        hits.append(hit)
    return torch.cat(losses).mean().item(), torch.cat(hits).float().mean().item()


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


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
    parser.add_argument("--run-mode", default="auto", choices=["auto", "shared", "new"], help="which ranks open a run")
    parser.add_argument("--rank-scope", default="global", choices=["global", "worker"], help="unit: the job, or a node")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training data")
    parser.add_argument("--lr", type=float, default=1e-2, help="largest learning rate")
    parser.add_argument("--project", default="digits", help="W&B project")
    parser.add_argument("--name", default="accelerate", help="display name of the run")
    parser.add_argument("--log-dir", type=Path, default="runs", help="where the runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
