"""Loggers for frameworks that log through an object of a few methods. Copy the class for yours.

    torchrun --nproc_per_node 2 loggers.py torchtitan
    torchrun --nproc_per_node 2 loggers.py torchtune

The functions call them where torchtune's recipes (0.6) and torchtitan's trainer (0.3) do, without these frameworks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from digits import train

import dist_wandb


class TorchtuneLogger:
    """For torchtune. In the config of a recipe: ``metric_logger: {_component_: loggers.TorchtuneLogger}``.

    Recipes have a logger on rank 0 only, and give it numbers that they have reduced.
    """

    def __init__(self, project: str = "torchtune", log_dir: str | None = None, **arguments: Any) -> None:
        self.run = dist_wandb.init(project, dir=log_dir, **arguments)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.run.config.update(config)

    def log(self, name: str, data: Any, step: int) -> None:
        self.run.log({name: data}, step=step)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self.run.log(payload, step=step)

    def close(self) -> None:
        self.run.finish()


class TorchtitanLogger:
    """For torchtitan. Set it on every rank, before training: ``trainer.metrics_processor.logger = TorchtitanLogger()``.

    The trainer logs on every rank, so throughput and memory are means over all ranks instead of those of one.
    """

    def __init__(self, project: str = "torchtitan", **arguments: Any) -> None:
        self.run = dist_wandb.init(project, **arguments)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def torchtune() -> None:
    logger = TorchtuneLogger("digits", name="torchtune") if dist.get_rank() == 0 else None
    if logger is not None:
        logger.log_config({"lr": 0.5})
    for step, loss in train():
        dist.all_reduce(loss)
        if logger is not None:
            logger.log_dict({"loss": loss.item() / dist.get_world_size(), "lr": 0.5}, step=step)
    if logger is not None:
        logger.close()


def torchtitan() -> None:
    logger = TorchtitanLogger("digits", name="torchtitan")
    for step, loss in train():
        logger.log({"loss_metrics/local_loss": loss.item(), "rank": dist.get_rank()}, step=step)
    logger.close()


WAYS = {"torchtune": torchtune, "torchtitan": torchtitan}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    way = parser.parse_args().way
    dist.init_process_group("gloo")
    WAYS[way]()
    dist.destroy_process_group()
