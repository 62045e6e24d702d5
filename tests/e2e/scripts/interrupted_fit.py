"""Lightning: Ctrl-C on both ranks in the first seconds of a training whose second rank the Trainer has started."""

import sys
from typing import Any

import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning_trainers import Layer, samples, trainer_of_two

from dist_wandb import DistWandbLogger


class Interrupted(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise KeyboardInterrupt
        self.log("loss", 2.0 * self.global_rank)
        return super().training_step(batch, batch_idx)


def main(directory: str) -> None:
    observer: Any = _ChildProcessObserver.__init__
    observer.__defaults__ = (1,)  # seconds, of 5, until the Trainer kills the first rank after the second one
    trainer_of_two(DistWandbLogger(project="tests", save_dir=directory)).fit(Interrupted(), samples(20))


if __name__ == "__main__":
    main(*sys.argv[1:])
