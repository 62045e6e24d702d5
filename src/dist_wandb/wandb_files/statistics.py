"""Running statistics of metrics, in bounded memory whatever the length of the history."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

TREND_LENGTH = 256
"""Largest number of points kept of a metric's history."""


@dataclass(frozen=True)
class MetricHistory:
    """The values of one metric over a run, in the order in which they were logged.

    Args:
        count: Number of rows that carry the metric.
        not_finite: How many of them are NaN or infinite.
        last: The value logged last.
        smallest: The smallest value, NaN left aside; NaN if there is no other.
        largest: The largest value, NaN left aside; NaN if there is no other.
        trend: The mean of each of at most `TREND_LENGTH` equal stretches of the history, oldest first. Values that are
            not finite are left aside; a stretch without any other is NaN.
    """

    count: int
    not_finite: int
    last: float
    smallest: float
    largest: float
    trend: tuple[float, ...]


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
        only_nan = self._smallest > self._largest
        return MetricHistory(
            count=self._count,
            not_finite=self._not_finite,
            last=self._last,
            smallest=math.nan if only_nan else self._smallest,
            largest=math.nan if only_nan else self._largest,
            trend=self._trend.means(),
        )


class Trend:
    """Means over equal stretches of a series of unknown length, in bounded memory.

    Whenever the room is used up, neighbouring stretches are merged and all further ones are twice as long.

    Args:
        room: Largest number of stretches, an even one.
    """

    __slots__ = ("_finite", "_length", "_length_of_last", "_means", "_room")

    def __init__(self, room: int = TREND_LENGTH) -> None:
        self._room = room
        self._means = array("d")  # of the finite values of each stretch,
        self._finite = array("q")  # and their number
        self._length = 1  # of every stretch, but for the last, of which there is only this much:
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
        """The mean of the finite values of each stretch, oldest first; NaN where there is none."""
        return tuple(self._means)

    def _merge_neighbours(self) -> None:
        stretches = list(zip(self._means, self._finite, strict=True))
        pairs = zip(stretches[::2], stretches[1::2], strict=True)
        merged = [_merged(*left, *right) for left, right in pairs]
        self._means = array("d", (mean for mean, _ in merged))
        self._finite = array("q", (finite for _, finite in merged))
        self._length *= 2


def _merged(mean: float, finite: int, other_mean: float, other_finite: int) -> tuple[float, int]:
    """The mean of so many values and of so many others, and their number; NaN for none."""
    if not other_finite:
        return mean, finite
    if not finite:
        return other_mean, other_finite
    share = other_finite / (finite + other_finite)
    return mean * (1 - share) + other_mean * share, finite + other_finite  # a sum of values could overflow
