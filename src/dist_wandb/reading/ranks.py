"""What the metrics of a run tell about its ranks: names of single ranks, and which rank is slow."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.statistics import MetricHistory

_OF_RANK = re.compile(r"((?:worker-\d{1,7}-)?rank-\d{1,7})/(.+)", re.DOTALL)
SPREAD = ("min", "max", "std", "argmax_rank")
"""What is written beside a mean over ranks, below its name."""

_STRAGGLER = "/straggler_rank"
_RARELY = 20  # who was named in less than one of so many rows is not named for the whole run


@dataclass(frozen=True)
class SlowRank:
    """The rank that held the others up.

    Args:
        rank: The rank.
        metric: The metric that names it.
        times: Number of rows that name it.
        rows: Number of rows with timings.
        excess: How many seconds longer than the others such a rank was busy, on average; NaN if not logged.
    """

    rank: int
    metric: str
    times: int
    rows: int
    excess: float


def slow_rank(metrics: Mapping[str, MetricHistory]) -> SlowRank | None:
    """Find the rank that held the others up, by what the rows themselves say; `None` if none did in a 20th of them.

    A row has ``time/straggler_rank`` only where one rank was the busiest for some time: see `exchange.stragglers`.

    Args:
        metrics: The metrics of a run.
    """
    for name, metric in metrics.items():
        if not name.endswith(_STRAGGLER) or not metric.counts:
            continue
        start = name.removesuffix("straggler_rank")
        steps = metrics.get(f"{start}step")
        rows = max(metric.count, steps.count if steps else 0)
        value, times = metric.counts[0]
        if times * _RARELY >= rows:
            return SlowRank(int(value), name, times, rows, _mean(metrics.get(f"{start}straggler_excess")))
    return None


def spreads_among(metrics: Mapping[str, MetricHistory]) -> dict[str, dict[str, MetricHistory]]:
    """By name the spread over ranks, by kind, of those metrics that have all of it beside them."""
    of_names = {name: {kind: metrics.get(f"{name}/{kind}") for kind in SPREAD} for name in metrics}
    return {name: found for name, found in of_names.items() if None not in found.values()}  # type: ignore[misc]


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


def _mean(metric: MetricHistory | None) -> float:
    """The mean of the finite values, about."""
    finite = [value for value in metric.trend if math.isfinite(value)] if metric else []
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan
