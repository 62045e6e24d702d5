"""Find data of single ranks in the metrics of a run: names with a rank, and the slow rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.statistics import MetricHistory

_OF_RANK = re.compile(r"((?:worker-\d{1,7}-)?rank-\d{1,7})/(.+)", re.DOTALL)
SPREAD = ("min", "max", "std", "argmax_rank")
"""Last parts of the names of the statistics that are written below the name of a mean over ranks."""

_STRAGGLER = "/straggler_rank"
_RARELY = 20  # a rank named in less than one of this number of rows is not reported for the run


@dataclass(frozen=True)
class SlowRank:
    """The rank that delayed the others."""

    rank: int  # global rank
    metric: str  # name of the metric that names the rank
    times: int  # number of rows that name the rank
    rows: int  # number of rows with timings
    excess: float  # by how many seconds the named ranks were busy longer than the others, on average; NaN if not logged


def slow_rank(metrics: Mapping[str, MetricHistory]) -> SlowRank | None:
    """Return the rank that most rows name as a straggler; `None` if none is named in a 20th of the rows."""
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
    """Return the spread over ranks (by kind, as in `SPREAD`) of each metric that was logged with a complete spread."""
    of_names = {name: {kind: metrics.get(f"{name}/{kind}") for kind in SPREAD} for name in metrics}
    return {name: found for name, found in of_names.items() if None not in found.values()}  # type: ignore[misc]


def by_rank(names: Iterable[str]) -> list[str]:
    """Sort names in natural order. Names of single ranks (``rank-1/loss``) follow the plain name."""

    def order(name: str) -> tuple[list[str], bool, list[str]]:
        found = of_rank(name)
        return (natural_order(found[1]), True, natural_order(name)) if found else (natural_order(name), False, [])

    return sorted(names, key=order)


def of_rank(name: str) -> tuple[str, str] | None:
    """Split the name of a metric of a single rank into label and plain name; `None` for other names."""
    found = _OF_RANK.fullmatch(name)
    return (found[1], found[2]) if found else None


def _mean(metric: MetricHistory | None) -> float:
    finite = [value for value in metric.trend if math.isfinite(value)] if metric else []
    return math.fsum(value / len(finite) for value in finite) if finite else math.nan
