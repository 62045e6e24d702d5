"""The network and the data of the scripts in this directory: scikit-learn's handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Module:
    """A small network with the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load_batches(rank: int = 0, world_size: int = 1, size: int = 32) -> list[Batch]:
    """This rank's share of the 1797 images of 8x8 pixels and their labels; the same number on each rank."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    mine = order[rank::world_size][: len(order) // world_size]
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    return [(images[indices], labels[indices]) for indices in mine.split(size)]


def train() -> Iterator[tuple[int, torch.Tensor]]:
    """Train for one epoch, and yield the loss of this rank in each step."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step, (images, labels) in enumerate(load_batches(dist.get_rank(), dist.get_world_size())):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, loss.detach()
