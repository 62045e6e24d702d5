"""Running statistics of metrics in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

TREND_LENGTH = 256
"""Largest number of points kept of a metric's history."""


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
    """

    count: int
    not_finite: int
    last: float
    smallest: float
    largest: float
    trend: tuple[float, ...]


def joined(histories: Sequence[MetricHistory]) -> MetricHistory:
    """The statistics of a metric of which the parts follow each other, as before and after a restart.

    The trend has the parts at the lengths that their numbers of values have to each other.
    """
    if len(histories) == 1:
        return histories[0]
    values = sum(part.count for part in histories)
    trend: list[float] = []
    for part in histories:
        room = max(1, round(TREND_LENGTH * part.count / values))
        stretch = Trend(room + room % 2)
        for mean in part.trend:
            stretch.add(mean)
        trend += stretch.means()
    known = [part for part in histories if not math.isnan(part.smallest)]
    return MetricHistory(
        count=values,
        not_finite=sum(part.not_finite for part in histories),
        last=histories[-1].last,
        smallest=min((part.smallest for part in known), default=math.nan),
        largest=max((part.largest for part in known), default=math.nan),
        trend=tuple(trend),
    )


class RunningMetric:
    """Running statistics of one metric."""

    __slots__ = ("_count", "_largest", "_last", "_not_finite", "_smallest", "_trend")

    def __init__(self) -> None:
        self._count = 0
        self._not_finite = 0
        self._last = math.nan
        self._smallest = math.inf
        self._largest = -math.inf
        self._trend = Trend()

    def add(self, value: float) -> None:
        """Add the next value."""
        self._count += 1
        self._last = value
        self._not_finite += not math.isfinite(value)
        self._trend.add(value)
        if not math.isnan(value):
            self._smallest = min(self._smallest, value)
            self._largest = max(self._largest, value)

    def history(self) -> MetricHistory:
        """The statistics of all values so far."""
        has_any = self._smallest <= self._largest
        return MetricHistory(
            count=self._count,
            not_finite=self._not_finite,
            last=self._last,
            smallest=self._smallest if has_any else math.nan,
            largest=self._largest if has_any else math.nan,
            trend=self._trend.means(),
        )


class Trend:
    """Means over equal stretches of a series of unknown length, in bounded memory.

    When all stretches are used, neighbours are merged, and further stretches are twice as long.

    Args:
        room: Largest number of stretches; even.
    """

    __slots__ = ("_finite", "_length", "_length_of_last", "_means", "_room")

    def __init__(self, room: int = TREND_LENGTH) -> None:
        self._room = room
        self._means = array("d")  # of the finite values of each stretch
        self._finite = array("q")  # number of these values
        self._length = 1  # of every stretch but the last
        self._length_of_last = 0

    def add(self, value: float) -> None:
        """Add the next value."""
        if not self._means or self._length_of_last == self._length:
            if len(self._means) == self._room:
                self._merge_neighbours()
            self._means.append(math.nan)
            self._finite.append(0)
            self._length_of_last = 0
        self._length_of_last += 1
        if math.isfinite(value):
            self._means[-1], self._finite[-1] = _merged(self._means[-1], self._finite[-1], float(value), 1)

    def means(self) -> tuple[float, ...]:
        """The mean of the finite values of each stretch, oldest first; NaN for a stretch without any."""
        return tuple(self._means)

    def _merge_neighbours(self) -> None:
        stretches = list(zip(self._means, self._finite, strict=True))
        pairs = zip(stretches[::2], stretches[1::2], strict=True)
        merged = [_merged(*left, *right) for left, right in pairs]
        self._means = array("d", (mean for mean, _ in merged))
        self._finite = array("q", (finite for _, finite in merged))
        self._length *= 2


def _merged(mean: float, finite: int, other_mean: float, other_finite: int) -> tuple[float, int]:
    """Combine two means and their numbers of values; NaN is the mean of no values."""
    if not other_finite:
        return mean, finite
    if not finite:
        return other_mean, other_finite
    share = other_finite / (finite + other_finite)
    return mean * (1 - share) + other_mean * share, finite + other_finite  # a sum of values could overflow
