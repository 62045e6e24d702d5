"""Lightning ddp: wandb's idiom, `init` before the Trainer has started its processes; then its logger reuses the run."""

import sys
import time
from typing import Any

import torch
from lightning_trainers import Layer, samples, trainer_of_two
from stored import PATIENT

import dist_wandb as wandb
from dist_wandb import DistWandbLogger, Limits

PAUSE = 2.0  # seconds; longer than the ranks wait for one that opens no session


class Model(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            time.sleep(PAUSE)
        self.log("rank", float(self.global_rank))
        return super().training_step(batch, batch_idx)


def main(directory: str) -> None:
    limits: Any = Limits(heartbeat=PATIENT, join_timeout=1.0)
    run = wandb.init(project="tests", config={"width": 3}, dir=directory, mode="offline", limits=limits)
    model = Model(outputs=wandb.config["width"])
    trainer = trainer_of_two(DistWandbLogger(checkpoint_name=f"model-{run.id}"))
    trainer.fit(model, samples(6))
    wandb.log({"after": trainer.global_rank + 1})
    wandb.finish()
    assert wandb.run is None, "finish has left the run open"


if __name__ == "__main__":
    main(*sys.argv[1:])
