"""Statistics of metrics, from all of their values in a file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dist_wandb.wandb_files.records import whole

TREND_LENGTH = 256
"""Largest number of points of a trend."""

_MOST_COUNTED = 4096  # ranks


@dataclass(frozen=True)
class MetricHistory:
    """Statistics of one metric over a run, in the order of logging.

    Args:
        count: Number of rows with the metric.
        not_finite: Number of NaN and infinite values.
        last: The last value.
        smallest: The smallest value except NaN; NaN if there is none.
        largest: The largest value except NaN; NaN if there is none.
        trend: The means of the finite values in at most `TREND_LENGTH` equal stretches of the history, oldest first;
            NaN for a stretch without any.
        counts: Each value and its number of occurrences, the most frequent first; only for metrics whose values are
            ranks.
    """

    count: int
    not_finite: int
    last: float
    smallest: float
    largest: float
    trend: tuple[float, ...] = field(repr=False)
    counts: tuple[tuple[float, int], ...] = field(default=(), repr=False)


def history_of(values: Sequence[float], *, counted: bool = False) -> MetricHistory:
    """Return the statistics of at least one value, with the number of occurrences of each value if `counted`."""
    finite = list(filter(math.isfinite, values))
    known = finite if len(finite) == len(values) else [value for value in values if not math.isnan(value)]
    counts = Counter(finite).most_common(_MOST_COUNTED) if counted else []
    return MetricHistory(
        count=len(values),
        not_finite=len(values) - len(finite),
        last=whole(values[-1]),
        smallest=whole(min(known, default=math.nan)),
        largest=whole(max(known, default=math.nan)),
        trend=trend_of(values),
        counts=tuple((whole(value), count) for value, count in counts),
    )


def joined(histories: Sequence[MetricHistory]) -> MetricHistory:
    """Join the statistics of consecutive parts of a metric; each has a share of the trend by its number of values."""
    if len(histories) == 1:
        return histories[0]
    values = sum(part.count for part in histories)
    trend: list[float] = []
    for part in histories:
        trend += trend_of(part.trend, max(1, round(TREND_LENGTH * part.count / values)))
    counts: Counter[float] = Counter()
    for part in histories:
        counts.update(dict(part.counts))
    known = [part for part in histories if not math.isnan(part.smallest)]
    return MetricHistory(
        count=values,
        not_finite=sum(part.not_finite for part in histories),
        last=histories[-1].last,
        smallest=min((part.smallest for part in known), default=math.nan),
        largest=max((part.largest for part in known), default=math.nan),
        trend=tuple(trend),
        counts=tuple(counts.most_common()),
    )


def trend_of(values: Sequence[float], most: int = TREND_LENGTH) -> tuple[float, ...]:
    """Return the means of at most `most` stretches of about the same length."""
    stretches = min(len(values), most)
    bounds = [index * len(values) // stretches for index in range(stretches + 1)] if stretches else []
    return tuple(mean_of(values[begin:end]) for begin, end in pairwise(bounds))


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none."""
    if len(values) == 1:
        return float(values[0]) if math.isfinite(values[0]) else math.nan
    finite = list(filter(math.isfinite, values))
    total = sum(finite)
    if math.isfinite(total):
        return total / len(finite) if finite else math.nan
    return sum(value / len(finite) for value in finite)  # their sum is too large
