"""The numbers of a row as lists that combine over ranks: sums and maxima, and their reduction. Pure.

The numbers of n names take `SUMS` times n sums: first all w*x, then all w, all x, all counts. They take `MAXIMA` times
n maxima: all x, then all -x. A count packs three numbers, so that one sum counts them all: how many ranks gave a
number, how many of these are integers, and how many are NaN, which `largest` and `smallest` exclude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import neg
from typing import NamedTuple

from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

SUMS, MAXIMA = 4, 2  # lanes of each name
NOTHING = -math.inf  # the maximum of no numbers
MOST_RANKS = 2**17  # three such counts are exact in one float64
_INTEGER, _NAN = float(MOST_RANKS), float(MOST_RANKS) ** 2

Lanes = tuple[list[float], list[float]]  # sums and maxima of some names, as above


class Number(NamedTuple):
    """What some ranks gave under one name."""

    weighted: float = 0.0  # sum of w*x
    weight: float = 0.0  # sum of w
    plain: float = 0.0  # sum of x
    counts: float = 0.0  # the three counts
    largest: float = NOTHING  # largest x
    minus_smallest: float = NOTHING  # the smallest x, negated

    def plus(self, other: Number) -> Number:
        return Number(
            self.weighted + other.weighted,
            self.weight + other.weight,
            self.plain + other.plain,
            self.counts + other.counts,
            max(self.largest, other.largest),
            max(self.minus_smallest, other.minus_smallest),
        )

    @property
    def given(self) -> int:
        """How many ranks gave a number: not those that gave `None`, an attachment, or a number without weight."""
        return int(self.counts) % MOST_RANKS

    @property
    def is_nan(self) -> bool:
        return self.counts >= _NAN

    def reduced(self, reduction: str) -> float:
        """Return the result of a reduction: the mean of equal numbers is that number, and integers stay integers."""
        if self.is_nan:
            return math.nan
        smallest = -self.minus_smallest
        if self.largest < smallest:  # no number counts: the results are those of numpy
            return 0.0 if reduction == "nansum" else math.nan
        if reduction in ("sum", "nansum"):
            return self._as_integer(self.plain)
        if reduction == "min" or smallest == self.largest:
            return self._as_integer(smallest)
        # the mean: https://en.wikipedia.org/wiki/Weighted_arithmetic_mean
        return self._as_integer(self.largest) if reduction == "max" else self.weighted / self.weight

    def _as_integer(self, value: float) -> float:
        integers, given = divmod(int(self.counts), MOST_RANKS)
        return int(value) if integers == given and abs(value) <= LARGEST_EXACT_INTEGER else value


NO_NUMBER = Number()  # of a rank that contributes, but no number: an attachment, `None`, or a number without weight
NAN_LEFT_OUT = Number(counts=1.0)  # a NaN where NaN does not count


def number_of(value: float, weight: float = 1.0, *, ignores_nan: bool = False) -> Number:
    """Return one rank's number. With a weight of 0 it does not count; with `ignores_nan`, NaN does not either."""
    if weight == 0:
        return NO_NUMBER
    try:
        x = float(value)
    except OverflowError:  # an integer beyond all floats
        x = math.copysign(math.inf, value > 0 or -1)
    if x != x:  # noqa: PLR0124  # NaN
        return NAN_LEFT_OUT if ignores_nan else Number(x, weight, x, 1.0 + _NAN)
    is_integer = isinstance(value, int) and abs(value) <= LARGEST_EXACT_INTEGER
    return Number(weight * x, weight, x, 1.0 + _INTEGER * is_integer, x, -x)


def lanes_of(numbers: Sequence[Number]) -> Lanes:
    columns = list(zip(*numbers, strict=True)) or [()] * (SUMS + MAXIMA)
    return [number for column in columns[:SUMS] for number in column], [*columns[SUMS], *columns[SUMS + 1]]


def lanes_of_floats(values: list[float], weight: float) -> Lanes | None:
    """Return the lanes of floats with one weight; `None` if one of them is NaN, or the weight is 0."""
    if weight == 0 or any(map(math.isnan, values)):
        return None
    ones = [1.0] * len(values)
    weighted = values if weight == 1.0 else [weight * value for value in values]
    weights = ones if weight == 1.0 else [weight] * len(values)
    return [*weighted, *weights, *values, *ones], [*values, *map(neg, values)]


def placed(lanes: Lanes, places: Sequence[int], names: int) -> Lanes:
    """Return lanes of so many names: those of some of them, at these places, and of no numbers."""
    sums, maxima = [0.0] * (SUMS * names), [NOTHING] * (MAXIMA * names)
    for index, place in enumerate(places):
        sums[place::names] = lanes[0][index :: len(places)]
        maxima[place::names] = lanes[1][index :: len(places)]
    return sums, maxima


def number_at(sums: Sequence[float], maxima: Sequence[float], index: int, names: int) -> Number:
    weighted, weight, plain, counts = sums[index : SUMS * names : names]
    return Number(weighted, weight, plain, counts, maxima[index], maxima[names + index])


def reduced_numbers(
    sums: Sequence[float], maxima: Sequence[float], reductions: Sequence[str], given: int
) -> list[float]:
    names = len(reductions)
    # faster, if all are means, and so many ranks have given a number that is no integer and not NaN under each name
    if reductions.count("mean") == names and sums[SUMS * names - names : SUMS * names].count(float(given)) == names:
        columns = zip(sums[:names], sums[names : 2 * names], maxima[:names], maxima[names : 2 * names], strict=True)
        return [largest if largest == -smallest else w_x / w for w_x, w, largest, smallest in columns]
    return [number_at(sums, maxima, index, names).reduced(how) for index, how in enumerate(reductions)]
