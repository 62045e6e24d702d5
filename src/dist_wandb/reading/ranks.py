"""What the metrics of a run tell about its ranks: names of single ranks, and which rank is slow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.statistics import MetricHistory

_OF_RANK = re.compile(r"((?:worker-\d{1,7}-)?rank-\d{1,7})/(.+)", re.DOTALL)
_STRAGGLER = "/straggler_rank"
_FEWEST_ROWS = 10  # in which ranks were compared
_BY_CHANCE = 0.01  # largest probability that a rank is named though all are alike
_NOTABLE = 0.05  # of a step's time


@dataclass(frozen=True)
class SlowRank:
    """The rank that holds the others up.

    Args:
        rank: The rank.
        metric: The metric that shows it.
        times: Number of rows in which it was the slowest.
        rows: Number of rows in which ranks were compared.
        excess: How much longer than the median the slowest rank was busy, on average, in seconds; NaN if not logged.
        step: How long a step took on average, in seconds; NaN if not logged.
    """

    rank: int
    metric: str
    times: int
    rows: int
    excess: float
    step: float


def slow_rank(metrics: Mapping[str, MetricHistory], world_size: int | None) -> SlowRank | None:
    """Find the rank that was the slowest more often than chance explains; `None` if the ranks are alike.

    Args:
        metrics: The metrics of a run.
        world_size: The number of ranks, if it is known.
    """
    for name, metric in metrics.items():
        if not name.endswith(_STRAGGLER) or not metric.counts:
            continue
        start = name.removesuffix("straggler_rank")
        rows = sum(times for _, times in metric.counts)
        value, times = metric.counts[0]
        ranks = max(2, len(metric.counts), world_size or 0)
        excess, step = _mean(metrics.get(f"{start}straggler_excess")), _mean(metrics.get(f"{start}step"))
        is_notable = not excess < _NOTABLE * step  # also if one of them is not logged
        if rows >= _FEWEST_ROWS and is_notable and _chance(times, rows, ranks) < _BY_CHANCE:
            return SlowRank(int(value), name, times, rows, excess, step)
    return None


def by_rank(names: Iterable[str]) -> list[str]:
    """Names in natural order, those of single ranks (``rank-1/loss``) behind the name that they are of."""

    def order(name: str) -> tuple[list[str], bool, list[str]]:
        found = _OF_RANK.fullmatch(name)
        return (
            (natural_order(name), False, []) if found is None else (natural_order(found[2]), True, natural_order(name))
        )

    return sorted(names, key=order)


def of_rank(name: str) -> tuple[str, str] | None:
    """Label and name of a metric of a single rank; `None` for others."""
    found = _OF_RANK.fullmatch(name)
    return (found[1], found[2]) if found else None


def _chance(times: int, rows: int, ranks: int) -> float:
    """An upper bound (Chernoff's) of the probability that any of equal ranks is the slowest in so many rows."""
    seen, expected = times / rows, 1 / ranks
    if seen <= expected:
        return 1.0
    rest = (1 - seen) * math.log((1 - seen) / (1 - expected)) if seen < 1 else 0.0
    return min(1.0, ranks * math.exp(-rows * (seen * math.log(seen / expected) + rest)))


def _mean(metric: MetricHistory | None) -> float:
    """The mean of the finite values, about."""
    finite = [value for value in metric.trend if math.isfinite(value)] if metric else []
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan
