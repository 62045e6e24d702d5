"""Tables and images of all ranks through each integration in turn, in one job of two processes."""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning_trainers import Layer, samples, trainer_of_two
from PIL import Image
from stored import PATIENT

import dist_wandb
from dist_wandb import DistWandbLogger
from dist_wandb.accelerate import DistWandbTracker
from dist_wandb.settings.plan import RunMode

COLUMNS: list[Any] = ["text", "score", "image"]


def rows(rank: int) -> list[list[Any]]:
    """One row on rank 0, two on rank 1."""
    image = Image.new("RGB", (4, 4), (rank, 0, 0))
    return [[f"é {rank}-{place}", float("nan") if rank else 0.5, image] for place in range(1 + rank)]


def picture(rank: int) -> torch.Tensor:
    return torch.full((3, 4, 4), 100 + rank)


class Model(Layer):
    def on_train_epoch_end(self) -> None:
        assert isinstance(self.logger, DistWandbLogger)
        rank = self.global_rank
        self.logger.log_table("table", COLUMNS, rows(rank), step=1, gather=True)
        self.logger.log_image("images", [picture(rank)], step=2, caption=[f"of {rank}"], gather=True)
        if rank == 1:
            self.logger.log_table("one", ["a"], [[1]], step=3, gather=True)


def lightning(directory: Path, run_mode: RunMode) -> None:
    logger = DistWandbLogger(
        save_dir=directory, id="exp", project="tests", run_mode=run_mode, limits=dist_wandb.Limits(heartbeat=PATIENT)
    )
    trainer_of_two(logger).fit(Model(), samples(4))
    logger.experiment.finish()


def accelerate(directory: Path) -> None:
    accelerator = Accelerator(
        cpu=True, log_with=DistWandbTracker(id="exp", dir=str(directory), limits=dist_wandb.Limits(heartbeat=PATIENT))
    )
    accelerator.init_trackers("tests")
    tracker = accelerator.get_tracker("dist_wandb")
    rank = accelerator.process_index
    tracker.log_table("table", COLUMNS, rows(rank), step=1, gather=True)
    tracker.log_images({"images": [picture(rank)] * (rank + 1)}, step=2, gather=True)
    accelerator.end_training()


if __name__ == "__main__":
    into = Path(sys.argv[1])
    lightning(into / "auto", "auto")
    lightning(into / "shared", "shared")
    accelerate(into / "accelerate")
