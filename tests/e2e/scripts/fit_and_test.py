"""Lightning: fit, then test, in forked ranks."""

import sys

import torch
import wandb
from lightning_trainers import Layer, samples, trainer_of_two
from stored import PATIENT, ROWS

from dist_wandb import DistWandbLogger, Limits


class Model(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank + batch_idx)
        assert bool(wandb.run) is (self.global_rank == 0)  # elsewhere a stand-in
        wandb.log({"by_wandb": float(self.global_rank)})
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("tested", 10.0 * self.global_rank + len(batch))


def main(directory: str) -> None:
    data = samples(2 * ROWS)
    logger = DistWandbLogger("nm", directory, "exp", project="tests", limits=Limits(heartbeat=PATIENT))
    logger.log_hyperparams({"lr": 0.1})
    _ = logger.experiment  # a run that the forked ranks inherit
    trainer = trainer_of_two(logger, strategy="ddp_fork")
    model = Model()
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    logger.experiment.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
