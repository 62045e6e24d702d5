"""The aggregate of all contributions to one number: sums and extremes that combine over ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

SUM_LANES = 7  # sum of w*x, of w, of x, number of contributors, of contributions, of integers, of NaNs
MAX_LANES = 2  # x, -x
_new = tuple.__new__  # skips the defaults, which is faster: it is called for every number


class Totals(NamedTuple):
    """The aggregate of all contributions to one name at one step."""

    weighted: float = 0.0  # sum of w*x
    weight: float = 0.0  # sum of w
    plain: float = 0.0  # sum of x
    contributors: int = 0  # number of ranks that contributed, including those whose number has no weight
    number: int = 0  # number of contributions
    integers: int = 0  # how many of them are integers
    nans: int = 0  # how many of them are NaN; `largest` and `smallest` exclude these
    largest: float = -math.inf  # largest x
    smallest: float = math.inf  # smallest x

    @classmethod
    def of(cls, value: float, weight: float = 1.0) -> Totals:
        """Return the totals of one contribution. A weight of 0 means that it does not count."""
        if weight == 0:
            return cls(contributors=1)
        try:
            x = float(value)
        except OverflowError:  # an integer beyond all floats
            x = math.copysign(math.inf, value > 0 or -1)
        if x != x:  # noqa: PLR0124  # NaN; called for every number
            return cls(x, weight, x, 1, 1, 0, 1)
        is_integer = isinstance(value, int) and abs(value) <= LARGEST_EXACT_INTEGER
        return _new(cls, (weight * x, weight, x, 1, 1, int(is_integer), 0, x, x))

    def without_nan(self) -> Totals:
        """Return the totals of one contribution where NaN does not count: a NaN then contributes no number."""
        return Totals(contributors=1, number=1) if self.nans else self

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]  # a tuple's would concatenate
        return Totals(
            self.weighted + other.weighted,
            self.weight + other.weight,
            self.plain + other.plain,
            self.contributors + other.contributors,
            self.number + other.number,
            self.integers + other.integers,
            self.nans + other.nans,
            max(self.largest, other.largest),
            min(self.smallest, other.smallest),
        )

    def lanes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the numbers to be summed over ranks, and the numbers to be reduced by maximum."""
        return self[:SUM_LANES], (self.largest, -self.smallest)

    @classmethod
    def from_lanes(cls, sums: Sequence[float], at: int, maxima: Sequence[float], largest_at: int) -> Totals:
        """Return the inverse of `lanes`, for lanes that begin at `at` and `largest_at` in the two lists."""
        weighted, weight, plain, contributors, number, integers, nans = sums[at : at + SUM_LANES]
        counts = int(contributors), int(number), int(integers), int(nans)
        return _new(cls, (weighted, weight, plain, *counts, maxima[largest_at], -maxima[largest_at + 1]))

    def reduced(self, reduction: str) -> float:
        """Return the result of a reduction.

        The mean is sum(w*x) / sum(w) (https://en.wikipedia.org/wiki/Weighted_arithmetic_mean). The mean of equal
        numbers is that number, and integers stay integers. If all ranks contributed NaN, which does not count,
        `"nanmean"` is NaN and `"nansum"` is 0, as in numpy.
        """
        if self.nans:
            return math.nan
        if self.largest < self.smallest:  # no number counts
            return 0.0 if reduction == "nansum" else math.nan
        if reduction in ("sum", "nansum"):
            return self._as_integer(self.plain)
        if reduction == "min" or self.smallest == self.largest:
            return self._as_integer(self.smallest)
        return self._as_integer(self.largest) if reduction == "max" else self.weighted / self.weight

    def _as_integer(self, value: float) -> float:
        exact = self.integers == self.number and abs(value) <= LARGEST_EXACT_INTEGER
        return int(value) if exact else value
