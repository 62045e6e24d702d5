"""Time of a step with each tracker of Accelerate: two processes of torchrun, 20 metrics per step.

A step is one iteration of the loop: forward, `accelerator.backward` with ddp's all_reduce, the optimizer, and computing
20 metrics and logging them with `accelerator.log`. The first 20 steps do not count. Each number is the median (or mean)
of one job, on the rank with the larger value; jobs alternate. `accelerator.end_training` is measured separately.

- no tracker: the 20 metrics are computed, but not logged.
- WandBTracker: the stock tracker, which logs the values of the main process. No rank has the values of the others.
- WandBTracker, gather: the same with the mean of each metric over ranks, by ``accelerator.gather(value).mean()``.
- dist_wandb: `DistWandbTracker`, each metric the mean over ranks.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks import common

_WAYS = ("no tracker", "WandBTracker", "WandBTracker, gather", "dist_wandb")


def measure(options: common.Options) -> common.Result:
    """Run jobs with each tracker, alternating."""
    from benchmarks import training

    result = training.compare("accelerate_step", __file__, _WAYS, options)
    ratio = result.ratio(training.STEP, "dist_wandb", "WandBTracker")
    result.targets.append(common.Target("step with dist_wandb / WandBTracker without reduction", 1.10, ratio))
    return result


def job(arguments: dict[str, Any]) -> None:
    """Run one rank of a job with one tracker."""
    import torch
    from accelerate import Accelerator
    from benchmarks import training

    from dist_wandb.accelerate import DistWandbTracker

    way, directory = arguments["way"], arguments["directory"]
    stock = "wandb" if way.startswith("WandBTracker") else None
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker() if way == "dist_wandb" else stock)
    rank = accelerator.process_index
    accelerator.init_trackers("step", init_kwargs={"wandb": {"dir": directory}, "dist_wandb": {"dir": directory}})
    model = training.network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    intervals = common.Intervals()
    for step, batch in enumerate(training.batches(arguments["steps"])):
        intervals.tick()
        loss = training.loss_of(model, list(batch))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        metrics = training.metrics_of(loss)
        if "gather" in way:
            metrics = {name: accelerator.gather(value).mean() for name, value in metrics.items()}
        if way != "no tracker":
            accelerator.log({name: value.item() for name, value in metrics.items()}, step=step)
    start = time.perf_counter()
    accelerator.end_training()
    common.report(directory, rank, training.outcome(intervals, time.perf_counter() - start))


if __name__ == "__main__":
    common.main(measure, job, __doc__)
