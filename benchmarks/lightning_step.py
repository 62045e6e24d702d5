"""Time of a Lightning step with each logger: two gloo processes (ddp on the CPU), 20 metrics per step.

Every step logs 20 tensors by `self.log`, with ``log_every_n_steps=1``. A step is the time from one
`on_train_batch_start` to the next: data, forward, backward, ddp's all_reduce, the optimizer, Lightning's own
bookkeeping and the logger. The first 20 steps do not count. Each number is the median (or mean) of one job, on the
rank with the larger value; jobs alternate. Processor time is that of all threads of both ranks, without wandb's own
process, and includes what is left after the last step. That work is also measured separately: from `on_train_end` until
the trainer has returned and the run is finished.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks import common

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

_WAYS = ("no logger", "WandbLogger", "WandbLogger, sync_dist", "dist_wandb", "dist_wandb, spread")


def measure(options: common.Options) -> common.Result:
    """Run jobs with each logger, alternating."""
    from benchmarks import training

    result = training.compare("lightning_step", __file__, _WAYS, options, by_torchrun=False)
    for title, limit in ((training.CPU, 1.03), (training.MEAN, 1.05)):
        ratio = result.ratio(title, "dist_wandb", "WandbLogger")
        result.targets.append(common.Target(f"{title}: dist_wandb / WandbLogger without sync", limit, ratio))
    for ours in _WAYS[3:]:
        ratio = result.ratio(training.STEP, ours, "WandbLogger")
        result.targets.append(common.Target(f"step with {ours} / WandbLogger without sync", 1.10, ratio))
        ratio = result.ratio(training.STEP, ours, "WandbLogger, sync_dist")
        result.targets.append(common.Target(f"step with {ours} / WandbLogger with sync_dist", 0.5, ratio))
    return result


def job(arguments: dict[str, Any]) -> None:
    """Run one rank of a job with one logger."""
    import torch
    from benchmarks import training
    from lightning.pytorch import Callback, LightningModule, Trainer

    way, directory = arguments["way"], arguments["directory"]

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = training.network()

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            loss = training.loss_of(self.network, batch)
            for name, value in training.metrics_of(loss).items():
                self.log(name, value, sync_dist="sync_dist" in way)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Stopwatch(Callback):
        intervals = common.Intervals()
        ended = 0.0

        def on_train_batch_start(self, *_args: Any) -> None:
            self.intervals.tick()

        def on_train_end(self, *_args: Any) -> None:
            self.ended = time.perf_counter()

    stopwatch = Stopwatch()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=arguments["steps"],
        logger=_logger(way, directory),
        log_every_n_steps=1,
        callbacks=stopwatch,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), training.batches(arguments["steps"]))
    _finish(way)
    finish_seconds = time.perf_counter() - stopwatch.ended
    common.report(directory, trainer.global_rank, training.outcome(stopwatch.intervals, finish_seconds))


def _logger(way: str, directory: str) -> Logger | bool:
    from lightning.pytorch.loggers import WandbLogger

    from dist_wandb import DistWandbLogger

    if way == "no logger":
        return False
    if way.startswith("dist_wandb"):
        return DistWandbLogger(project="step", save_dir=directory, offline=True, spread="spread" in way)
    return WandbLogger(project="step", save_dir=directory, offline=True)


def _finish(way: str) -> None:
    import wandb

    import dist_wandb

    if way.startswith("dist_wandb"):
        dist_wandb.get_run().finish()
    elif wandb.run is not None:
        wandb.run.finish()


if __name__ == "__main__":
    common.main(measure, job, __doc__)
