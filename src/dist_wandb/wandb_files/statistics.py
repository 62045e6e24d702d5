"""Running statistics of metrics in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

TREND_LENGTH = 256
"""Largest number of points kept of a metric's history."""

NAMES_OF_RANKS = ("/argmax_rank", "/straggler_rank")
"""Name endings of the metrics whose values are ranks."""

_MOST_COUNTED = 4096  # ranks
_BATCH = 64  # values that are added at once


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


def joined(histories: Sequence[MetricHistory]) -> MetricHistory:
    """Join the statistics of consecutive parts of a metric; each has a share of the trend by its number of values."""
    if len(histories) == 1:
        return histories[0]
    values = sum(part.count for part in histories)
    trend: list[float] = []
    for part in histories:
        room = max(1, round(TREND_LENGTH * part.count / values))
        stretch = Trend(room + room % 2)
        stretch.add_all(part.trend)
        trend += stretch.means()
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


class RunningMetric:
    """Running statistics of one metric, with the number of occurrences of each value if `counted`."""

    __slots__ = ("_count", "_counts", "_largest", "_last", "_not_finite", "_pending", "_smallest", "_trend")

    def __init__(self, *, counted: bool = False) -> None:
        self._pending: list[float] = []  # adding many at once takes a fifth of the time
        self._count = 0
        self._not_finite = 0
        self._last = math.nan
        self._smallest = math.inf
        self._largest = -math.inf
        self._trend = Trend()
        self._counts: Counter[float] | None = Counter() if counted else None

    def add(self, value: float) -> None:
        """Add the next value."""
        self._pending.append(value)
        if len(self._pending) == _BATCH:
            self._add_pending()

    def history(self) -> MetricHistory:
        """Return the statistics of all values so far."""
        if self._pending:
            self._add_pending()
        has_any = self._smallest <= self._largest
        return MetricHistory(
            count=self._count,
            not_finite=self._not_finite,
            last=self._last,
            smallest=self._smallest if has_any else math.nan,
            largest=self._largest if has_any else math.nan,
            trend=self._trend.means(),
            counts=tuple(self._counts.most_common()) if self._counts else (),
        )

    def _add_pending(self) -> None:
        values, self._pending = self._pending, []
        self._count += len(values)
        self._last = values[-1]
        self._trend.add_all(values)
        finite = list(filter(math.isfinite, values))
        self._not_finite += len(values) - len(finite)
        known = finite if len(finite) == len(values) else [value for value in values if not math.isnan(value)]
        if known:
            self._smallest = min(self._smallest, *known)
            self._largest = max(self._largest, *known)
        if self._counts is not None:
            self._counts.update(value for value in finite if value in self._counts or len(self._counts) < _MOST_COUNTED)


class Trend:
    """Means over equal stretches of a series of unknown length, in bounded memory.

    When all stretches are used, neighbours are merged, and further stretches are twice as long.
    """

    __slots__ = ("_finite", "_length", "_length_of_last", "_means", "_room")

    def __init__(self, room: int = TREND_LENGTH) -> None:
        self._room = room  # largest number of stretches; even
        self._means = array("d")  # of the finite values of each stretch
        self._finite = array("q")  # number of these values
        self._length = 1  # of every stretch except the last
        self._length_of_last = 0

    def add_all(self, values: Sequence[float]) -> None:
        """Add the next values."""
        begin = 0
        while begin < len(values):
            if not self._means or self._length_of_last == self._length:
                if len(self._means) == self._room:
                    stretches = list(zip(self._means, self._finite, strict=True))
                    merged = [
                        _merged(*one, *next_one) for one, next_one in zip(stretches[::2], stretches[1::2], strict=True)
                    ]
                    self._means = array("d", (mean for mean, _ in merged))
                    self._finite = array("q", (number for _, number in merged))
                    self._length *= 2
                self._means.append(math.nan)
                self._finite.append(0)
                self._length_of_last = 0
            end = min(len(values), begin + self._length - self._length_of_last)
            finite = list(filter(math.isfinite, values[begin:end]))
            if finite:
                mean = float(finite[0]) if len(finite) == 1 else sum(value / len(finite) for value in finite)
                self._means[-1], self._finite[-1] = _merged(self._means[-1], self._finite[-1], mean, len(finite))
            self._length_of_last += end - begin
            begin = end

    def means(self) -> tuple[float, ...]:
        """Return the mean of the finite values of each stretch, oldest first; NaN for a stretch without any."""
        return tuple(self._means)


def _merged(mean: float, finite: int, other_mean: float, other_finite: int) -> tuple[float, int]:
    """Combine two means and their numbers of values; NaN is the mean of no values."""
    if not other_finite:
        return mean, finite
    if not finite:
        return other_mean, other_finite
    share = other_finite / (finite + other_finite)
    return mean * (1 - share) + other_mean * share, finite + other_finite  # a sum of values could overflow
