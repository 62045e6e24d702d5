"""What is kept of the rows of one metric, in bounded memory: its curve, and which rank had the largest value.

A curve starts with all its points. Once there are too many, neighbours are joined into *stretches*. Each stretch keeps
its first, last, smallest and largest point (as in M4 aggregation), and the sum and number of its values. A curve drawn
from these points looks like the full one, as long as each stretch is narrower than a few pixels.

Of values that were reduced over ranks a row contains the mean, the maximum and the rank with the maximum. So `Blame`
knows of that one rank by how much it exceeds the others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import NamedTuple

from dist_wandb.cli.report.page import HeatMap, Slowest, shortened
from dist_wandb.job.ranges import named
from dist_wandb.wandb_files.stragglers import RANK, Timing, slow_ranks

Point = tuple[float, float]

MOST_STRETCHES = 512  # largest number of stretches of one curve
_MOST_PARTS = 128  # of the x axis
_MOST_RANKS = 1024  # of one heat map
_LARGEST_RANK = 1_000_000
_NOTICEABLE = 0.05  # share of the mean


class Stretch(NamedTuple):
    """Neighbouring points of a curve."""

    number: int  # number of points
    total: float  # sum of their values
    first: Point  # the first point
    smallest: Point  # the point with the smallest value
    largest: Point  # the point with the largest value
    last: Point  # the last point

    @property
    def mean(self) -> float:
        return self.total / self.number

    def joined(self, later: Stretch) -> Stretch:
        return Stretch(
            self.number + later.number,
            self.total + later.total,
            self.first,
            min(self.smallest, later.smallest, key=itemgetter(1)),
            max(self.largest, later.largest, key=itemgetter(1)),
            later.last,
        )


class Budget:
    """The number of stretches that all curves of a page share."""

    def __init__(self, stretches: int) -> None:
        self._stretches = stretches
        self.curves: int = 0

    @property
    def each(self) -> int:
        """The current largest number of stretches of one curve."""
        return max(1, min(MOST_STRETCHES, self._stretches // max(1, self.curves)))


class Curve:
    """A series of points of any length, in any order."""

    __slots__ = ("_budget", "_stretches", "_x", "_y", "axis", "gaps", "last")

    def __init__(self, budget: Budget, axis: str) -> None:
        budget.curves += 1
        self.axis = axis  # the name of its x axis
        self.last: float = math.nan  # the last value; NaN if there is none
        self.gaps: int = 0  # number of values that are not finite
        self._budget = budget
        self._stretches: list[Stretch] = []
        self._x: list[float] = []  # points that are not yet in a stretch
        self._y: list[float] = []

    def add(self, x: float, y: float) -> None:
        """Add a point. A value that is not finite leaves a gap, and is counted."""
        self.last = y
        if math.isfinite(y):
            self._x.append(x)
            self._y.append(y)
            if len(self._y) >= 2 * MOST_STRETCHES:
                self._shorten()
        else:
            self.gaps += 1

    def absorb(self, other: Curve) -> None:
        """Add the points of a later curve, such as that of a resumed run."""
        self._shorten()
        other._shorten()
        self._stretches += other._stretches
        self.last = other.last
        self.gaps += other.gaps

    def shift(self, by: float) -> None:
        """Move all points along the x axis."""
        self._shorten()
        ends = [[(x + by, y) for x, y in stretch[2:]] for stretch in self._stretches]
        self._stretches = [Stretch(*old[:2], *new) for old, new in zip(self._stretches, ends, strict=True)]

    def stretches(self, most: int = MOST_STRETCHES) -> list[Stretch]:
        """Return the stretches in the order of the x axis; at most `most`, and at most as many as the budget allows."""
        self._shorten()
        return sorted(_at_most(most, self._stretches), key=lambda stretch: stretch.first[0])

    def points(self, most: int = MOST_STRETCHES) -> list[Point]:
        """Return the points to draw, in the order of the x axis."""
        stretches = self.stretches(most)
        if all(stretch.number == 1 for stretch in stretches):  # the last of several points at one position counts
            return list({stretch.first[0]: stretch.first for stretch in stretches}.values())
        of_each = ({one.first, one.smallest, one.largest, one.last} for one in stretches)
        return sorted(point for points in of_each for point in points)

    def _shorten(self) -> None:
        """Join points and stretches until there are no more stretches than the budget allows."""
        size = max((stretch.number for stretch in self._stretches), default=1)
        for begin in range(0, len(self._y), size):  # in the order in which the points were added
            xs, ys = self._x[begin : begin + size], self._y[begin : begin + size]
            low, high = min(ys), max(ys)
            smallest, largest = (xs[ys.index(low)], low), (xs[ys.index(high)], high)
            total = sum(ys)  # may be infinite; `math.fsum` would raise
            self._stretches.append(Stretch(len(ys), total, (xs[0], ys[0]), smallest, largest, (xs[-1], ys[-1])))
        self._x, self._y = [], []
        self._stretches = _at_most(self._budget.each, self._stretches)


def _at_most(most: int, stretches: list[Stretch]) -> list[Stretch]:
    """Join pairs of neighbours until there are at most `most` stretches."""
    while len(stretches) > most:
        pairs = zip_longest(stretches[::2], stretches[1::2])
        stretches = [one.joined(other) if other else one for one, other in pairs]
    return stretches


def edges_of(curves: Iterable[Sequence[Stretch]], most: int) -> list[float]:
    """Divide the x axis of all curves into at most `most` equal parts: the start of the first, the end of each."""
    positions = [stretch.first[0] for stretches in curves for stretch in stretches]
    if not positions:
        return []
    low, high = min(positions), max(positions)
    parts = max(1, min(most, len(set(positions))))
    return [low + (high - low) * part / parts for part in range(parts)] + [high]


def cells(stretches: Iterable[Stretch], edges: Sequence[float]) -> list[Stretch | None]:
    """Join what is in each part of the x axis. A stretch belongs to the part that contains its first point."""
    made: list[Stretch | None] = [None] * (len(edges) - 1)
    for stretch in stretches:
        part = min(max(0, bisect_right(edges, stretch.first[0]) - 1), len(made) - 1)
        before = made[part]
        made[part] = before.joined(stretch) if before else stretch
    return made


@dataclass
class _Part:
    """Neighbouring rows: the first position, the number of rows, and the summed excess of each rank."""

    begin: float
    rows: int = 0
    excess: Counter[int] = field(default_factory=Counter)


class Blame:
    """Collects which rank has the largest value of one metric, by position on its x axis."""

    def __init__(self, name: str, axis: str) -> None:
        self.name = name
        self.axis = axis
        self._parts: list[_Part] = []
        self._rows_of_each = 1
        self._end = 0.0
        self.rows: Counter[int] = Counter()  # by rank, those in which it has the largest value
        self._excess: Counter[int] = Counter()
        self._mean = 0.0  # sum of the means of the rows that have one
        self._means = 0

    def add(self, x: float, rank: float, excess: float, mean: float = math.nan) -> None:
        """Add a row in which `rank` (if any) has the largest value, `excess` above the mean over all ranks."""
        if not self._parts or self._parts[-1].rows >= self._rows_of_each:
            if len(self._parts) == _MOST_PARTS:
                for one, other in zip(self._parts[::2], self._parts[1::2], strict=True):
                    one.rows += other.rows
                    one.excess.update(other.excess)
                self._parts = self._parts[::2]
                self._rows_of_each *= 2
            self._parts.append(_Part(x))
        part = self._parts[-1]
        part.rows += 1
        self._end = x
        if math.isfinite(mean):
            self._mean += mean
            self._means += 1
        if not (0 <= rank <= _LARGEST_RANK and rank == int(rank) and 0 <= excess < math.inf):
            return
        index = int(rank)
        part.excess[index] += excess  # type: ignore[assignment]  # Counter is typed for integers, but adds floats
        self._excess[index] += excess  # type: ignore[assignment]
        self.rows[index] += 1

    def heat_map(self, world: int | None) -> HeatMap | None:
        """Return by how much each rank exceeds the mean, per row; `None` if no row names a rank."""
        if not self.rows:
            return None
        size = max(max(self.rows) + 1, world or 0)
        shown = range(size) if size <= _MOST_RANKS else sorted(self.rows, key=self._excess.__getitem__)[-_MOST_RANKS:]
        cells: list[list[float | None]] = [
            [shortened(part.excess.get(rank, 0.0) / part.rows, 4) for part in self._parts] for rank in shown
        ]
        edges = [shortened(part.begin, 12) for part in self._parts] + [shortened(self._end, 12)]
        return HeatMap(self.name, "excess", self.axis, [f"rank {rank}" for rank in shown], edges, cells)

    def slowest(self, world: int | None) -> Slowest | None:
        """Return the ranks that have the largest value too often, else the most often; `None` if no row names one."""
        if not self.rows:
            return None
        rows = sum(part.rows for part in self._parts)
        slow = slow_ranks(Timing(self.rows, rows), max(2, world or 0, max(self.rows) + 1))
        is_judged = self.name == RANK  # its rows name a rank only if it delays the others
        ranks = slow if slow and not is_judged else [max(self.rows, key=lambda rank: (self.rows[rank], -rank))]
        count = sum(self.rows[rank] for rank in ranks)
        excess = sum(self._excess[rank] for rank in ranks) / count
        mean = self._mean / self._means if self._means else math.nan
        relative = excess / mean if mean > 0 else math.nan
        stands_out = is_judged or (bool(slow) and not relative <= _NOTICEABLE)
        return Slowest(
            self.name, ranks[:_MOST_RANKS], named(ranks), count / rows, excess, relative, stands_out, not slow
        )
