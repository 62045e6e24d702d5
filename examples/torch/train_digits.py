"""Classify handwritten digits with plain PyTorch, logging through `dist_wandb.init`.

    python train_digits.py                                          # one process
    torchrun --nproc_per_node 2 train_digits.py                     # two processes, one run
    torchrun --nproc_per_node 2 train_digits.py --run-mode shared   # two processes that write into one run
    torchrun --nproc_per_node 2 train_digits.py --run-mode new      # two processes, a run for each, grouped

GPUs are used if there are any, one for each process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import dist_wandb


def main() -> None:
    args = parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    rank, world_size = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()

    mode = mode_without_login()
    if mode == "offline" and rank == 0:
        print("W&B has no API key, so it writes to disk only. To upload as you train, run `wandb login`.", flush=True)
    with dist_wandb.init(
        args.project,
        name=args.name,
        dir=args.log_dir,
        mode=mode,
        config={"epochs": args.epochs, "lr": args.lr},
        run_mode=args.run_mode,
        rank_scope=args.rank_scope,
    ) as run:
        train(run, args.epochs, args.lr, device, rank, world_size)

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        print_where(args.log_dir, args.run_mode, world_size)


def train(run: dist_wandb.Session, epochs: int, lr: float, device: torch.device, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    train_data, val_data = load_data()
    sampler = DistributedSampler(train_data, world_size, rank)
    train_loader = DataLoader(train_data, batch_size=32, sampler=sampler)
    val_loader = DataLoader(Subset(val_data, range(rank, len(val_data), world_size)), batch_size=32)
    model = make_model().to(device)
    parallel_model = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    scheduler = CosineAnnealingLR(optimizer, epochs)

    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        for batch in train_loader:
            images, labels = (tensor.to(device) for tensor in batch)
            loss = nn.functional.cross_entropy(parallel_model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 5 == 0:
                values = {"train/loss": loss, "lr": scheduler.get_last_lr()[0], "epoch": epoch}
                run.log(values, step=step, weight=len(labels))  # one row: the mean over the samples of all ranks
        scheduler.step()
        val_loss, val_accuracy = evaluate(model, val_loader, device)
        run.log({"val/loss": val_loss, "val/accuracy": val_accuracy, "epoch": epoch}, step=step)
        if rank == 0:
            print(f"epoch {epoch}: the last training batch of rank 0 had loss {loss.item():.3f}")


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device
) -> tuple[MeanMetric, MulticlassAccuracy]:
    """Update loss and accuracy with the samples of this rank. `run.log` merges them over ranks and computes them."""
    model.eval()
    loss, accuracy = MeanMetric().to(device), MulticlassAccuracy(10, average="micro").to(device)
    for batch in loader:
        images, labels = (tensor.to(device) for tensor in batch)
        logits = model(images)
        loss.update(nn.functional.cross_entropy(logits, labels), weight=len(labels))
        accuracy.update(logits, labels)
    return loss, accuracy


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
    parser.add_argument("--name", default="torch", help="display name of the run")
    parser.add_argument("--log-dir", type=Path, default="runs", help="where the runs are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
