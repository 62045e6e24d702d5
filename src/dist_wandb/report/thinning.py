"""Curves in bounded memory that keep the smallest and the largest value of every stretch.

A curve starts with all its points. Once there are too many, neighbours are joined into *stretches*. Each stretch keeps
its first, last, smallest and largest point (as in M4 aggregation), and the sum and number of its values. A curve drawn
from these points looks like the full one, as long as each stretch is narrower than a few pixels.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

Point = tuple[float, float]

MOST_STRETCHES = 512
"""Largest number of stretches of one curve."""

_FEWEST_STRETCHES = 16
_LARGEST = sys.float_info.max


class Stretch(NamedTuple):
    """Neighbouring points of a curve."""

    number: int  # number of points
    total: float  # sum of their values
    first: Point  # the first point
    smallest: Point  # the point with the smallest value
    largest: Point  # the point with the largest value
    last: Point  # the last point

    def points(self) -> list[Point]:
        """Return up to four points, sorted by their position on the x axis."""
        return sorted({self.first, self.smallest, self.largest, self.last})


class Budget:
    """The number of stretches that all curves of a page share."""

    def __init__(self, stretches: int) -> None:
        self._stretches = stretches
        self._curves = 0

    def add_curve(self) -> None:
        """Count one more curve."""
        self._curves += 1

    @property
    def each(self) -> int:
        """The current largest number of stretches of one curve; even."""
        share = self._stretches // max(1, self._curves)
        return max(_FEWEST_STRETCHES, min(MOST_STRETCHES, share // 2 * 2))


class Curve:
    """A series of points of any length, in any order."""

    __slots__ = ("_budget", "_stretches", "_x", "_y", "gaps", "last")

    def __init__(self, budget: Budget) -> None:
        budget.add_curve()
        self.last: float = math.nan
        """The last value; NaN if there is none."""
        self.gaps: int = 0
        """Number of values that are not finite."""
        self._budget = budget
        self._stretches: list[Stretch] = []
        self._x: list[float] = []  # points that are not yet in a stretch
        self._y: list[float] = []

    def add(self, x: float, y: float) -> None:
        """Add a point. A value that is not finite leaves a gap, and is counted."""
        self.last = y
        if -_LARGEST <= y <= _LARGEST:
            self._x.append(x)
            self._y.append(y)
            if len(self._y) >= 2 * MOST_STRETCHES:
                self._shorten(self._budget.each)
        else:  # NaN, an infinity, or an integer beyond any float
            self.gaps += 1

    def absorb(self, other: Curve) -> None:
        """Add the points of a later curve, such as that of a resumed run."""
        self._shorten(self._budget.each)
        other._shorten(self._budget.each)
        self._stretches += other._stretches
        self.last = other.last
        self.gaps += other.gaps

    def stretches(self, most: int | None = None) -> list[Stretch]:
        """Return the stretches in the order of the x axis; at most `most`, and at most as many as the budget allows."""
        self._shorten(self._budget.each)
        return sorted(_at_most(most or MOST_STRETCHES, self._stretches), key=lambda stretch: stretch.first[0])

    def points(self, most: int | None = None) -> list[Point]:
        """Return the points to draw, in the order of the x axis."""
        stretches = self.stretches(most)
        if all(stretch.number == 1 for stretch in stretches):  # the last of several points at one position counts
            return list({stretch.first[0]: stretch.first for stretch in stretches}.values())
        return sorted(point for stretch in stretches for point in stretch.points())

    def _shorten(self, most: int) -> None:
        """Join points and stretches until there are at most `most` stretches."""
        typical = max((stretch.number for stretch in self._stretches), default=1)
        self._stretches += _joined_points(self._x, self._y, typical)
        self._x, self._y = [], []
        self._stretches = _at_most(most, self._stretches)


def _at_most(most: int, stretches: list[Stretch]) -> list[Stretch]:
    """Join neighbours until there are at most `most` stretches."""
    while len(stretches) > most:
        stretches = _joined(stretches, 2 * max(stretch.number for stretch in stretches))
    return stretches


def _joined_points(xs: Sequence[float], ys: Sequence[float], size: int) -> list[Stretch]:
    """Join points, in the order in which they were added, into stretches of `size` points each."""
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
    """Join neighbours that have at most `size` points together. At least every second stretch is joined."""
    made: list[Stretch] = []
    alone = True  # whether the last of `made` is a single stretch
    for stretch in stretches:
        if made and (alone or made[-1].number + stretch.number <= size):
            made[-1] = join(made[-1], stretch)
            alone = False
        else:
            made.append(stretch)
            alone = True
    return made


def join(one: Stretch, other: Stretch) -> Stretch:
    """Join a stretch and a later one."""
    return Stretch(
        one.number + other.number,
        one.total + other.total,
        one.first,
        min(one.smallest, other.smallest, key=itemgetter(1)),
        max(one.largest, other.largest, key=itemgetter(1)),
        other.last,
    )


class Cell(NamedTuple):
    """A part of the x axis."""

    number: int  # number of points
    total: float  # sum of their values
    smallest: float  # the smallest value
    largest: float  # the largest value
    position: float  # position of the first point on the x axis

    @property
    def mean(self) -> float:
        """The mean value."""
        return self.total / self.number


def edges_of(curves: Iterable[Sequence[Stretch]], most: int) -> list[float]:
    """Divide the x axis of all curves into at most `most` equal parts: the start of the first, and the end of each.

    Empty if there are no points.
    """
    positions = [stretch.first[0] for stretches in curves for stretch in stretches]
    if not positions:
        return []
    low, high = min(positions), max(positions)
    parts = max(1, min(most, len(set(positions))))
    return [low + (high - low) * part / parts for part in range(parts)] + [high]


def cells(stretches: Iterable[Stretch], edges: Sequence[float]) -> list[Cell | None]:
    """Return the contents of each part of the x axis. A stretch belongs to the part that contains its first point."""
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
            before.position,
        )
    return made
