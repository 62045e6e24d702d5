"""A trial of a sweep that trains until it is stopped: it starts its own launcher, as the trial specifies."""

import os
import sys
import time
from typing import Any

AT_LEAST = 120.0  # seconds: a trial that is not stopped ends successfully, which is not expected


def saw(rank: int, run: Any) -> None:
    sys.stdout.write(f"\nSAW {rank} {run.id} lr={run.config['lr']}\n")


def with_torch() -> None:
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    with dist_wandb.init("digits", run_mode="shared", config={"lr": 7.0}) as run:
        saw(dist.get_rank(), run)
        begin = time.monotonic()
        while time.monotonic() - begin < AT_LEAST:
            run.log({"loss": 0.5})
            time.sleep(0.1)


def with_lightning() -> None:
    import lightning
    import torch
    from lightning_trainers import trainer_of_two

    from dist_wandb import DistWandbLogger

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.begin = time.monotonic()
            self.automatic_optimization = False

        def configure_model(self) -> None:
            saw(self.global_rank, logger.experiment)
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> None:
            time.sleep(0.1)
            self.log("loss", self.layer(batch).mean())  # Lightning may hang where SIGTERM meets a rank in backward
            seconds = time.monotonic() - self.begin
            # Lightning 2.6 loses a SIGTERM that arrives while it asks rank 0 for one, and then trains on alone.
            if self.global_rank and seconds > AT_LEAST / 2:
                raise TimeoutError
            if seconds > AT_LEAST:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=logger.experiment.config["lr"])

    logger: Any = DistWandbLogger(project="digits", config={"lr": 7.0})
    batches: Any = torch.ones(1000, 1)
    trainer_of_two(logger, max_epochs=-1).fit(Model(), torch.utils.data.DataLoader(batches))


def main(launcher: str) -> None:
    if launcher == "torchrun" and "RANK" not in os.environ:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", *sys.argv]
        os.execv(sys.executable, [sys.executable, "-m", *words])  # noqa: S606
    {"torchrun": with_torch, "lightning": with_lightning}[launcher]()


if __name__ == "__main__":
    main(dict(argument.lstrip("-").split("=") for argument in sys.argv[1:])["launcher"])
