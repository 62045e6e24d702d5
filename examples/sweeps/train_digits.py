"""Classify handwritten digits as a trial of a W&B sweep (`sweep.yaml`): the run's config has the trial's values.

wandb sweep --project digits examples/sweeps/sweep.yaml
wandb agent ENTITY/digits/ID
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dist_wandb


def main() -> None:
    dist.init_process_group("gloo")
    with dist_wandb.init(config={"lr": 0.01, "epochs": 1, "width": 32}) as run:  # defaults without a sweep
        config = run.config  # has the trial's values on all ranks, before the model is built
        model = nn.Sequential(nn.Linear(64, config["width"]), nn.ReLU(), nn.Linear(config["width"], 10))
        train(run, DistributedDataParallel(model), config["lr"], config["epochs"])
    dist.destroy_process_group()


def train(run: dist_wandb.Session, model: nn.Module, lr: float, epochs: int) -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(images.flatten(1), labels)
    sampler = DistributedSampler(data)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=64, sampler=sampler):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            run.log({"loss": loss, "epoch": epoch}, step=step, weight=len(targets))  # the mean over both ranks


if __name__ == "__main__":
    main()
