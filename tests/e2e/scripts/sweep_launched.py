"""A trial of a sweep that trains until it is stopped: it starts its own launcher, as the trial specifies."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

ACCELERATE = ("--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "trainer": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": ("accelerate.commands.launch", *ACCELERATE, "--main_process_port=0"),
}
AT_LEAST = 120.0  # seconds: a trial that is not stopped ends successfully, which is not expected


def saw(rank: int, run: Any) -> None:
    sys.stdout.write(f"\nSAW {rank} {run.id} lr={run.config['lr']}\n")


def rows(log: Callable[[dict[str, float]], object]) -> None:
    begin = time.monotonic()
    while time.monotonic() - begin < AT_LEAST:
        log({"loss": 0.5})
        time.sleep(0.1)


def with_torch() -> None:
    import torch.distributed as dist

    import dist_wandb

    dist.init_process_group("gloo")
    with dist_wandb.init("digits", run_mode="shared", config={"lr": 7.0}) as run:
        saw(dist.get_rank(), run)
        rows(run.log)


def with_accelerate() -> None:
    from accelerate import Accelerator

    from dist_wandb import DistWandbTracker

    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker())
    accelerator.init_trackers("digits", config={"lr": 7.0})
    tracker: Any = accelerator.get_tracker("dist_wandb")
    saw(accelerator.process_index, tracker.session)
    rows(accelerator.log)


def with_lightning() -> None:
    import lightning
    import torch

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
            if time.monotonic() - self.begin > AT_LEAST:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=logger.experiment.config["lr"])

    logger: Any = DistWandbLogger(project="digits", config={"lr": 7.0})
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=logger,
        log_every_n_steps=1,
        max_epochs=-1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches: Any = torch.ones(1000, 1)
    trainer.fit(Model(), torch.utils.data.DataLoader(batches))


def with_trainer() -> None:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    import dist_wandb
    from dist_wandb import DistWandbCallback

    class Model(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed here
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
            time.sleep(0.1)
            return {"loss": self.layer(value).mean()}

    with dist_wandb.init("digits", config={"lr": 7.0}) as run:  # before the arguments are created from its config
        arguments = TrainingArguments(
            "out",
            learning_rate=run.config["lr"],
            use_cpu=True,
            max_steps=int(AT_LEAST / 0.1),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        saw(arguments.process_index, run)
        data = [{"value": torch.ones(1)}] * 100
        Trainer(Model(), arguments, train_dataset=data, callbacks=[DistWandbCallback()]).train()


def main(launcher: str) -> None:
    if launcher in LAUNCHERS and "RANK" not in os.environ:
        os.execv(sys.executable, [sys.executable, "-m", *LAUNCHERS[launcher], *sys.argv])  # noqa: S606
    trains = {
        "torchrun": with_torch,
        "accelerate": with_accelerate,
        "lightning": with_lightning,
        "trainer": with_trainer,
    }
    trains[launcher]()


if __name__ == "__main__":
    main(dict(argument.lstrip("-").split("=") for argument in sys.argv[1:])["launcher"])
