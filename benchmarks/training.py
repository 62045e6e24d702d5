"""Common code of the benchmarks of training loops: a small network, its data, and a comparison of step times."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from benchmarks import common
from torch.utils.data import DataLoader, TensorDataset

METRICS = 20
_FEATURES, _CLASSES, _BATCH, _WIDTH = 256, 10, 128, 512
_WARM_UP = 20  # steps that are not measured


def network() -> torch.nn.Module:
    """Return a perceptron that takes 5 to 10 ms per step on one core of 2024."""
    return torch.nn.Sequential(
        torch.nn.Linear(_FEATURES, _WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(_WIDTH, _WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(_WIDTH, _CLASSES),
    )


def batches(count: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return `count` batches, made in advance so that no step waits for its data."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(count, _BATCH, _FEATURES, generator=generator)
    targets = torch.randint(_CLASSES, (count, _BATCH), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=None)


def loss_of(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of one batch."""
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def metrics_of(loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return as many different metrics as are logged per step."""
    return {f"metric_{index}": loss.detach() + index for index in range(METRICS)}


def outcome(intervals: common.Intervals, finish_seconds: float) -> dict[str, float]:
    """Return the report of a rank. Call it at the end: processor time counts until now.

    Args:
        intervals: Ticks at the start of each step.
        finish_seconds: Seconds from the end of the last step until `finish` has returned.
    """
    times = intervals.milliseconds(_WARM_UP)
    cpu = intervals.processor_milliseconds(_WARM_UP)
    return {"median": statistics.median(times), "mean": statistics.mean(times), "cpu": cpu, "finish": finish_seconds}


def compare(name: str, file: str, ways: tuple[str, ...], options: common.Options, **launch: Any) -> common.Result:
    """Run jobs of two ranks that train in several ways, alternating.

    Args:
        name: Name of the benchmark.
        file: The benchmark's ``__file__``. Its `job` receives `way` and `steps`, and reports the result of `outcome`.
        ways: Names of the ways; the first has no logger, the second the stock logger, without reduction.
        options: The amount of measurements.
        **launch: Further arguments of `run_ranks`.

    Returns:
        Median and mean step time of the slower rank, processor time of a step on both ranks together, and the time
        that finishing took on the slower rank.
    """
    series: dict[str, dict[str, list[float]]] = {kind: {way: [] for way in ways} for kind in _TITLES}
    steps = _WARM_UP + options.of(200, 5)
    for way in common.alternating(ways, options.repeats):
        reports = common.run_ranks(file, {"way": way, "steps": steps}, **launch)
        for kind, by_way in series.items():
            by_way[way].append((sum if kind == "cpu" else max)(report[kind] for report in reports))
    result = common.Result(name)
    for kind, by_way in series.items():
        result.add(_TITLES[kind], by_way, against=ways[1])
    return result


STEP = "step, median milliseconds"
MEAN = "step, mean milliseconds"
CPU = "processor time of a step on both ranks until the run is finished, milliseconds"
_TITLES = {
    "median": STEP,
    "mean": MEAN,
    "cpu": CPU,
    "finish": "from the last step until the run is finished, seconds",
}
