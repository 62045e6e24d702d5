"""What is known of all contributions to one number: sums and extremes that add up over ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

SUM_LANES = 7  # sum of w*x, of w, of x, number of contributors, of contributions, of integers, of NaNs
MAX_LANES = 2  # x, -x
_new = tuple.__new__  # without the defaults, and so quicker: it is on the way of every number


class Totals(NamedTuple):
    """What is known of all contributions to one name at one step.

    Args:
        weighted: Sum of w*x.
        weight: Sum of w.
        plain: Sum of x.
        contributors: Number of ranks that spoke, also those that gave their number no weight.
        number: Number of contributions.
        integers: How many of them are integers.
        nans: How many of them are NaN; they are left out of `largest` and `smallest`, which cannot hold them.
        largest: Largest x.
        smallest: Smallest x.
    """

    weighted: float = 0.0
    weight: float = 0.0
    plain: float = 0.0
    contributors: int = 0
    number: int = 0
    integers: int = 0
    nans: int = 0
    largest: float = -math.inf
    smallest: float = math.inf

    @classmethod
    def of(cls, value: float, weight: float = 1.0) -> Totals:
        """The totals of one contribution. A weight of 0 means none at all."""
        if weight == 0:
            return cls(contributors=1)
        try:
            x = float(value)
        except OverflowError:  # an integer beyond all floats
            x = math.copysign(math.inf, value > 0 or -1)
        if x != x:  # noqa: PLR0124  # NaN; on the way of every number
            return cls(x, weight, x, 1, 1, 0, 1)
        is_integer = isinstance(value, int) and abs(value) <= LARGEST_EXACT_INTEGER
        return _new(cls, (weight * x, weight, x, 1, 1, int(is_integer), 0, x, x))

    def without_nan(self) -> Totals:
        """The totals of one contribution where NaN has no part: then it is no number that counts, but one was given."""
        return Totals(contributors=1, number=1) if self.nans else self

    def __add__(self, other: Totals) -> Totals:  # type: ignore[override]  # a tuple's would string them together
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
        """As numbers to be summed over ranks, and numbers whose maximum over ranks is to be taken."""
        return self[:SUM_LANES], (self.largest, -self.smallest)

    @classmethod
    def from_lanes(cls, sums: Sequence[float], at: int, maxima: Sequence[float], largest_at: int) -> Totals:
        """The inverse of `lanes`, of lanes that begin somewhere in two lists."""
        weighted, weight, plain, contributors, number, integers, nans = sums[at : at + SUM_LANES]
        counts = int(contributors), int(number), int(integers), int(nans)
        return _new(cls, (weighted, weight, plain, *counts, maxima[largest_at], -maxima[largest_at + 1]))

    def reduced(self, reduction: str) -> float:
        """What `reduction` makes of the contributions.

        The mean is sum(w*x) / sum(w) (https://en.wikipedia.org/wiki/Weighted_arithmetic_mean). Equal numbers have
        themselves as their mean, and integers stay integers. Where all ranks gave NaN, which has no part, `"nanmean"`
        is NaN and `"nansum"` is 0, as in numpy.
        """
        if self.nans:
            return math.nan
        if self.largest < self.smallest:  # of no number that counts
            return 0.0 if reduction == "nansum" else math.nan
        if reduction in ("sum", "nansum"):
            return self._as_integer(self.plain)
        if reduction == "min" or self.smallest == self.largest:
            return self._as_integer(self.smallest)
        return self._as_integer(self.largest) if reduction == "max" else self.weighted / self.weight

    def _as_integer(self, value: float) -> float:
        exact = self.integers == self.number and abs(value) <= LARGEST_EXACT_INTEGER
        return int(value) if exact else value
