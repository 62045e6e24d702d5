"""Every case of the contract on one rank, through one integration. Cases are written once for all integrations."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import wandb
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning_trainers import Layer, samples, trainer_of_two
from torchmetrics import MeanMetric

import dist_wandb
from dist_wandb import DistWandbLogger
from dist_wandb.accelerate import DistWandbTracker

Pixels = np.ndarray[Any, Any]
Columns = list[str | int]
ROWS = 4
PROJECT = "contract"
_PATIENCE = 20.0  # seconds within which a value set on one rank must be visible on another
_VALUES = 8
_HEARTBEAT = 4.0  # seconds: a name's first row waits five heartbeats for all ranks, and is not written twice


class Part(ABC):
    """One rank's part in a job, as seen by the user of an integration."""

    rank: int

    @property
    @abstractmethod
    def run(self) -> Any:
        """The integration's W&B run of this rank."""

    @abstractmethod
    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log a row as users of this integration do."""

    def log_image(self, name: str, pixels: Pixels, step: int, caption: str | None = None) -> None:
        """Log an image, or with a caption a panel of all ranks; by the integration's own method if there is one."""
        made: Any = dist_wandb.gathered([pixels], caption=[caption]) if caption else dist_wandb.Image(pixels)
        self.log({name: made}, step)

    def log_table(self, name: str, columns: Columns, data: list[list[Any]], step: int, *, gather: bool = False) -> None:
        """Log a table, or the rows of all ranks as one; by the integration's method if there is one."""
        made: Any = dist_wandb.gathered(data, columns) if gather else dist_wandb.Table(columns=columns, data=data)
        self.log({name: made}, step)


Case = Callable[[Part], None]


class Plain(Part):
    """A session, or the package's functions, used like wandb's."""

    def __init__(self, session: Any) -> None:
        self.rank = dist.get_rank()
        self._session = session

    @property
    def run(self) -> Any:
        return self._session.run

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._session.log(values, step=step)


class Logger(Part):
    """The methods of a Lightning logger, as used by the Trainer and by Fabric."""

    def __init__(self, logger: DistWandbLogger) -> None:
        self.rank = dist.get_rank()
        self._logger = logger

    @property
    def run(self) -> Any:
        return self._logger.experiment

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._logger.log_metrics(values, step)

    def log_image(self, name: str, pixels: Pixels, step: int, caption: str | None = None) -> None:
        gathering: dict[str, Any] = {"caption": [caption], "gather": True} if caption else {}
        self._logger.log_image(name, [pixels], step, **gathering)

    def log_table(self, name: str, columns: Columns, data: list[list[Any]], step: int, *, gather: bool = False) -> None:
        self._logger.log_table(name, [str(column) for column in columns], data, step=step, gather=gather)


class InFabric(Logger):
    def __init__(self, fabric: Fabric, logger: DistWandbLogger) -> None:
        super().__init__(logger)
        self._fabric = fabric

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._fabric.log_dict(values, step)


class Accelerated(Part):
    def __init__(self, accelerator: Accelerator) -> None:
        self.rank = accelerator.process_index
        self._accelerator = accelerator

    @property
    def run(self) -> Any:
        return self._accelerator.get_tracker("dist_wandb", unwrap=True)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._accelerator.log(values, step=step)

    def log_image(self, name: str, pixels: Pixels, step: int, caption: str | None = None) -> None:
        self._accelerator.get_tracker("dist_wandb").log_images({name: [pixels]}, step=step, gather=caption is not None)

    def log_table(self, name: str, columns: Columns, data: list[list[Any]], step: int, *, gather: bool = False) -> None:
        self._accelerator.get_tracker("dist_wandb").log_table(name, columns, data, step=step, gather=gather)


class CaseModule(Layer):
    def __init__(self, play: Callable[[], None]) -> None:
        super().__init__()
        self.play = play

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.play()
        return super().training_step(batch, batch_idx)


def plain(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with dist_wandb.init(project=PROJECT, config=config, **arguments) as session:
        case(Plain(session))


def as_wandb(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist_wandb.init(project=PROJECT, config=config, **arguments)
    case(Plain(dist_wandb))
    dist_wandb.finish()


def lightning(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    logger = DistWandbLogger(project=PROJECT, **arguments)
    logger.log_hyperparams(config)
    trainer_of_two(logger).fit(CaseModule(lambda: case(Logger(logger))), samples(2))
    logger.experiment.finish()


def fabric(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    logger = DistWandbLogger(project=PROJECT, **arguments)
    held = Fabric(accelerator="cpu", strategy="ddp", devices=2, loggers=[logger])
    held.launch()
    logger.log_hyperparams(config)
    case(InFabric(held, logger))
    logger.experiment.finish()


def accelerate(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(**arguments))
    accelerator.init_trackers(PROJECT, config=config)
    case(Accelerated(accelerator))
    accelerator.get_tracker("dist_wandb").finish()


def transformers(case: Case, config: dict[str, Any], **arguments: Any) -> None:
    """Its imports are local, because they take as long as a case, and other integrations do not need them."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    from dist_wandb.transformers import DistWandbCallback

    class CaseModel(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed here
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
            assert callback.session is not None
            case(Plain(callback.session))
            return {"loss": self.layer(value).mean()}

    callback = DistWandbCallback(PROJECT, config=config, **arguments)
    of_trainer = TrainingArguments(
        f"{arguments['dir']}/out",
        use_cpu=True,
        max_steps=1,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"value": torch.ones(1)}] * 2
    Trainer(CaseModel(), of_trainer, train_dataset=data, callbacks=[callback]).train()
    assert callback.session is not None
    callback.session.finish()


def report(name: str, part: Part, **facts: Any) -> None:
    """Report what this rank observed to the test."""
    sys.stdout.write(f"\nSAW {json.dumps({'case': name, 'rank': part.rank, **facts})}\n")
    sys.stdout.flush()


def means(part: Part) -> None:
    """Rank 1 has one row less, at a different pace."""
    for step in range(ROWS - part.rank):
        part.log({"loss": 10.0 * part.rank + step, "epoch": 3, "tensor": torch.tensor(2.0 * part.rank)}, step)
    report("means", part, id=part.run.id, truthy=bool(part.run))


def metrics(part: Part) -> None:
    """Rank 0 has one value of 1, rank 1 three of 3: the mean of all four is 2.5."""
    metric = MeanMetric(sync_on_compute=False)
    for _ in range(1 + 2 * part.rank):
        metric.update(1.0 + 2.0 * part.rank)
    part.log({"merged": metric}, 1)


def config(part: Part) -> None:
    """Values given to the job, and values that the primary sets later."""
    given = part.run.config["lr"]
    if part.rank == 0:
        part.run.config.update({"later": 7})
    deadline = time.monotonic() + _PATIENCE
    while part.run.config.get("later") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    part.log({"loss": 1.0}, 0)
    report("config", part, lr=given, later=part.run.config["later"])


def odd_config(part: Part) -> None:
    part.log({"loss": 1.0}, 0)
    report("odd_config", part, lr=part.run.config["lr"])


def media(part: Part) -> None:
    """All ranks log the same, as scripts without rank checks do; the primary's values are written."""
    pixels = np.full((4 + part.rank, 4, 3), 255, np.uint8)
    part.log_image("picture", pixels, 1)
    part.log_table("predictions", ["rank", "label"], [[part.rank, "cat"], [part.rank, "dog"]], 1)
    part.log({"loss": float(part.rank)}, 1)


def gathered(part: Part) -> None:
    """One row of a table on rank 0, two on rank 1, which logs another table alone; an image of each."""
    rows = [[f"é {part.rank}-{place}", float("nan") if part.rank else 0.5] for place in range(1 + part.rank)]
    part.log_table("table", ["text", "score"], rows, 1, gather=True)
    part.log_image("panel", np.full((4, 4, 3), 100 + part.rank, np.uint8), 2, f"of {part.rank}")
    if part.rank == 1:
        part.log_table("alone", ["a"], [[1]], 3, gather=True)


def guarded(part: Part) -> None:
    """Rows that only one rank logs neither wait for the other nor stop it."""
    for step in range(ROWS):
        if part.rank == step % 2:
            part.log({f"only_on_{part.rank}": float(step)}, step)
    if part.rank == 1:
        part.log({"late": 5.0}, ROWS)


def silent(part: Part) -> None:
    del part  # nothing is logged on any rank


def unguarded_run(part: Part) -> None:
    """The run is used on every rank as if each had one."""
    run = part.run
    run.define_metric("best", summary="max")
    run.summary["best"] = 0.5
    run.config.update({"by_all": 1}, allow_val_change=True)
    run.log_code  # noqa: B018  # a method on one rank, and a stand-in on the other
    part.log({"loss": 1.0}, 0)


def beside(part: Part) -> None:
    """Rows and definitions through the run's own methods, and through wandb's functions."""
    part.log({"loss": float(part.rank)}, 1)
    part.run.log({"by_run": 2.0 * part.rank})
    wandb.log({"by_module": 2.0 * part.rank})
    if part.rank == 0:
        wandb.define_metric("val/*", step_metric="turn", step_sync=True)
        wandb.log({"own": 7.0}, step=2)
        type(wandb.run).log(wandb.run, {"past_us": 1.0})  # type: ignore[union-attr, arg-type]
    part.log({"turn": 5}, 3)
    for name in range(_VALUES):
        wandb.log({f"val/{name}": 1.0 + part.rank}, step=4)


def fails(part: Part) -> None:
    """Rank 1 raises; rank 0 continues until its launcher ends it. Nothing can follow."""
    part.log({"loss": 10.0 * part.rank}, 0)
    dist_wandb.get_run().flush()  # a failing rank does not wait: values that it has just logged may be missing
    if part.rank == 1:
        raise RuntimeError("raised by the case")
    time.sleep(_PATIENCE)


INTEGRATIONS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "as-wandb": as_wandb,
    "transformers": transformers,
}
CASES: tuple[Case, ...] = (means, metrics, config, odd_config, media, gathered, guarded, silent)
CASES += (unguarded_run, beside, fails)


def main(integration: str, directory: str) -> None:
    for case in CASES:
        config = {"lr": 0.1, **({"odd": object()} if case is odd_config else {})}
        begin = time.monotonic()
        limits = {"heartbeat": _HEARTBEAT}
        INTEGRATIONS[integration](case, config, id=case.__name__.replace("_", "-"), dir=directory, limits=limits)
        sys.stdout.write(f"\nTOOK {case.__name__} {time.monotonic() - begin:.1f}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
