"""Curves in bounded memory that keep the smallest and the largest value of every stretch.

A curve begins as its points. Once there are too many, neighbours are joined into *stretches*, each of which keeps its
first, last, smallest and largest point (as the M4 aggregation does), and the sum and number of its values. A curve
that is drawn of these points looks as the full one does, as long as a stretch is narrower than a few pixels.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

Point = tuple[float, float]

MOST_STRETCHES = 512
"""Largest number of stretches of one curve."""

_FEWEST_STRETCHES = 16
_LARGEST = sys.float_info.max


class Stretch(NamedTuple):
    """Neighbouring points of a curve.

    Args:
        number: How many points there are.
        total: The sum of their values.
        first: The first of them.
        smallest: The one with the smallest value.
        largest: The one with the largest value.
        last: The last of them.
    """

    number: int
    total: float
    first: Point
    smallest: Point
    largest: Point
    last: Point

    def points(self) -> list[Point]:
        """Up to four points, by their place on the x axis."""
        return sorted({self.first, self.smallest, self.largest, self.last})


class Budget:
    """The stretches that all curves of a page share.

    Args:
        stretches: How many there are for all curves together.
    """

    def __init__(self, stretches: int) -> None:
        self._stretches = stretches
        self._curves = 0

    def take_part(self) -> None:
        """Count one more curve."""
        self._curves += 1

    @property
    def each(self) -> int:
        """Largest number of stretches of a curve now; even."""
        share = self._stretches // max(1, self._curves)
        return max(_FEWEST_STRETCHES, min(MOST_STRETCHES, share // 2 * 2))


@dataclass
class Facts:
    """What holds for all values of a curve.

    Args:
        last: The last value; NaN if there is none.
        gaps: Number of values that are not finite.
    """

    last: float = math.nan
    gaps: int = 0


class Curve:
    """One series of points, of any length and in any order.

    Args:
        budget: What all curves share.
    """

    __slots__ = ("_budget", "_last", "_not_finite", "_stretches", "_x", "_y")

    def __init__(self, budget: Budget) -> None:
        budget.take_part()
        self._budget = budget
        self._stretches: list[Stretch] = []
        self._x: list[float] = []  # points that are no part of a stretch yet
        self._y: list[float] = []
        self._last = math.nan
        self._not_finite = 0

    def add(self, x: float, y: float) -> None:
        """Add a point. A value that is not finite leaves a gap, and is counted."""
        self._last = y
        if -_LARGEST <= y <= _LARGEST:
            self._x.append(x)
            self._y.append(y)
            if len(self._y) >= 2 * MOST_STRETCHES:
                self._shorten(self._budget.each)
        else:  # NaN, an infinity, or an integer beyond any float
            self._not_finite += 1

    def absorb(self, other: Curve) -> None:
        """Add the points of a curve that came later, such as those of a run that was resumed."""
        self._shorten(self._budget.each)
        other._shorten(self._budget.each)
        self._stretches += other._stretches
        self._last = other._last
        self._not_finite += other._not_finite

    def facts(self) -> Facts:
        """What holds for all values."""
        return Facts(self._last, self._not_finite)

    def stretches(self, most: int | None = None) -> list[Stretch]:
        """The stretches in the order of the x axis; at most so many, and as many as the budget has."""
        self._shorten(self._budget.each)
        return sorted(_at_most(most or MOST_STRETCHES, self._stretches), key=_place)

    def points(self, most: int | None = None) -> list[Point]:
        """The points to draw, in the order of the x axis. Of several single points at one place the last one counts."""
        stretches = self.stretches(most)
        if all(stretch.number == 1 for stretch in stretches):
            return list({stretch.first[0]: stretch.first for stretch in stretches}.values())
        return sorted(point for stretch in stretches for point in stretch.points())

    def _shorten(self, most: int) -> None:
        """Join points and stretches until there are at most so many stretches."""
        typical = max((stretch.number for stretch in self._stretches), default=1)
        self._stretches += _joined_points(self._x, self._y, typical)
        self._x, self._y = [], []
        self._stretches = _at_most(most, self._stretches)


def _place(stretch: Stretch) -> float:
    return stretch.first[0]


def _at_most(most: int, stretches: list[Stretch]) -> list[Stretch]:
    """Join neighbours until there are at most so many."""
    while len(stretches) > most:
        stretches = _joined(stretches, 2 * max(stretch.number for stretch in stretches))
    return stretches


def _joined_points(xs: Sequence[float], ys: Sequence[float], size: int) -> list[Stretch]:
    """Stretches of so many points each, in the order in which they came."""
    if size == 1:
        return [Stretch(1, y, point, point, point, point) for point in zip(xs, ys, strict=True) for y in point[1:]]
    made = []
    for begin in range(0, len(ys), size):
        part = ys[begin : begin + size]
        low, high = min(part), max(part)
        made.append(
            Stretch(
                len(part),
                sum(part),  # may be infinite; `math.fsum` would raise
                (xs[begin], part[0]),
                (xs[begin + part.index(low)], low),
                (xs[begin + part.index(high)], high),
                (xs[begin + len(part) - 1], part[-1]),
            )
        )
    return made


def _joined(stretches: Sequence[Stretch], size: int) -> list[Stretch]:
    """Join neighbours as long as they have at most so many points together; at least every second one."""
    made: list[Stretch] = []
    alone = True  # whether the last of `made` was joined with none
    for stretch in stretches:
        if made and (alone or made[-1].number + stretch.number <= size):
            made[-1] = join(made[-1], stretch)
            alone = False
        else:
            made.append(stretch)
            alone = True
    return made


def join(one: Stretch, other: Stretch) -> Stretch:
    """Two stretches as one, the first of which came earlier."""
    return Stretch(
        one.number + other.number,
        one.total + other.total,
        one.first,
        min(one.smallest, other.smallest, key=itemgetter(1)),
        max(one.largest, other.largest, key=itemgetter(1)),
        other.last,
    )


class Cell(NamedTuple):
    """A part of the x axis.

    Args:
        number: How many points lie in it.
        total: The sum of their values.
        smallest: The smallest value.
        largest: The largest value.
        place: Where the first of them lies.
    """

    number: int
    total: float
    smallest: float
    largest: float
    place: float

    @property
    def mean(self) -> float:
        """The mean value."""
        return self.total / self.number


def edges_of(curves: Iterable[Sequence[Stretch]], most: int) -> list[float]:
    """Begin, and ends, of at most so many equal parts of the x axis that the curves have in common."""
    places = [stretch.first[0] for stretches in curves for stretch in stretches]
    if not places:
        return []
    low, high = min(places), max(places)
    parts = max(1, min(most, len(set(places))))
    return [low + (high - low) * part / parts for part in range(parts)] + [high]


def cells(stretches: Iterable[Stretch], edges: Sequence[float]) -> list[Cell | None]:
    """What lies in each part of the x axis; a stretch lies where its first point does."""
    made: list[Cell | None] = [None] * (len(edges) - 1)
    for stretch in stretches:
        part = min(max(0, bisect_right(edges, stretch.first[0]) - 1), len(made) - 1)
        low, high = stretch.smallest[1], stretch.largest[1]
        before = made[part] or Cell(0, 0.0, low, high, stretch.first[0])
        made[part] = Cell(
            before.number + stretch.number,
            before.total + stretch.total,
            min(before.smallest, low),
            max(before.largest, high),
            before.place,
        )
    return made
