"""Ray Train's `TorchTrainer`: the worker function calls `dist_wandb.init`, on every worker.

    pip install 'ray[train]'
    python ray_train.py --workers 2

Ray starts the workers in directories of its own, so `dir` is an absolute path (on several machines, of a shared disk).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digits import load_batches, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dist_wandb


def train(config: dict[str, Any]) -> None:
    """Run by each worker, in a process group that Ray has formed."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    with dist_wandb.init("digits", name="ray", dir=config["dir"], config={"lr": config["lr"]}) as run:
        for step, (images, labels) in enumerate(load_batches(dist.get_rank(), dist.get_world_size())):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss}, step=step)  # one row: the mean over the workers


def main() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=".")
    args = parser.parse_args()
    TorchTrainer(
        train,
        train_loop_config={"lr": 0.5, "dir": str(args.dir.absolute())},
        torch_config=TorchConfig("gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
    ).fit()


if __name__ == "__main__":
    main()
