"""What is kept of the rows of one metric, in bounded memory: its curve, and which rank had the largest value.

Of a curve with too many points, neighbours are joined into *stretches*. Each stretch keeps its first, last, smallest
and largest point (as in M4 aggregation), and the sum and number of its values. A curve drawn from these points looks
like the full one, as long as each stretch is narrower than a few pixels.

Of values that were reduced over ranks a row contains the mean, the maximum and the rank with the maximum. So `Blame`
knows of that one rank by how much it exceeds the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dist_wandb.cli.report.page import Part, shortened
from dist_wandb.job.ranges import named
from dist_wandb.wandb_files.stragglers import RANK, Timing, slow_ranks

Numbers: TypeAlias = "npt.NDArray[np.float64]"
Point = tuple[float, float]

MOST_STRETCHES = 512  # largest number of stretches of one curve
_MOST_PARTS = 128  # of the x axis
_MOST_RANKS = 1024  # of one heat map
_LARGEST_RANK = 1_000_000
_NOTICEABLE = 0.05  # share of the mean


class Stretches(NamedTuple):
    """Neighbouring points of a curve, joined: an item for each stretch. A point has its position and its value."""

    number: Numbers  # of points
    total: Numbers  # sum of their values; may be infinite
    first: Numbers
    smallest: Numbers
    largest: Numbers
    last: Numbers

    def joined(self, group: npt.NDArray[np.intp]) -> Stretches:
        """Join neighbours with the same number in `group`, which is ascending."""
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        ends = np.append(starts[1:], len(group))[: len(starts)] - 1
        lowest = np.lexsort((self.smallest[:, 1], group))[starts]
        highest = np.lexsort((self.largest[:, 1], group))[ends]
        number, total = np.add.reduceat(self.number, starts), np.add.reduceat(self.total, starts)
        return Stretches(
            number, total, self.first[starts], self.smallest[lowest], self.largest[highest], self.last[ends]
        )

    def thinned(self, most: int) -> Stretches:
        """Join neighbours until there are at most `most` stretches, of the same number of earlier ones."""
        size = -(-len(self.number) // most)
        return self if size < 2 else self.joined(np.arange(len(self.number)) // size)  # noqa: PLR2004


class Budget:
    """The number of stretches that all curves of a page share."""

    def __init__(self, stretches: int) -> None:
        self._stretches = stretches
        self.curves: int = 0

    @property
    def each(self) -> int:  # stretches of one curve, at most
        return max(1, min(MOST_STRETCHES, self._stretches // max(1, self.curves)))


class Curve:
    """A series of points in any order. Values that are not finite leave gaps."""

    def __init__(self, budget: Budget, axis: str, x: Numbers, y: Numbers) -> None:
        budget.curves += 1
        points = np.column_stack((x, y))[np.isfinite(y)]
        self.axis = axis  # the name of its x axis
        self.last: float = float(y[-1])
        self.gaps: int = len(y) - len(points)  # number of values that are not finite
        self._budget = budget
        all_points = Stretches(np.ones(len(points)), points[:, 1], points, points, points, points)
        self._stretches = all_points.thinned(budget.each)

    def absorb(self, later: Curve) -> None:  # such as that of a resumed run
        self._stretches = Stretches(*map(np.concatenate, zip(self._stretches, later._stretches, strict=True)))
        self.last = later.last
        self.gaps += later.gaps

    def shift(self, by: float) -> None:
        number, total, *points = self._stretches
        self._stretches = Stretches(number, total, *(np.add(each, (by, 0)) for each in points))

    def stretches(self, most: int = MOST_STRETCHES) -> Stretches:
        """Return the stretches in the order of the x axis; at most `most`, and at most as many as the budget allows."""
        found = self._stretches.thinned(min(most, self._budget.each))
        order = np.argsort(found.first[:, 0], kind="stable")
        return Stretches(*(one[order] for one in found))

    def points(self, most: int = MOST_STRETCHES) -> list[Point]:  # to draw, in the order of the x axis
        number, _, *points = self.stretches(most)
        if (number == 1).all():  # the last of several points at one position counts
            return list(dict(points[0].tolist()).items())
        return [(x, y) for x, y in np.unique(np.concatenate(points), axis=0).tolist()]


def edges_of(curves: Iterable[Stretches], most: int) -> list[float]:
    """Divide the x axis of all curves into at most `most` equal parts: the start of the first, the end of each."""
    positions = np.unique(np.concatenate([stretches.first[:, 0] for stretches in curves]))
    if not len(positions):
        return []
    low, high = positions[[0, -1]].tolist()
    parts = max(1, min(most, len(positions)))
    return [low + (high - low) * part / parts for part in range(parts)] + [high]


def cells(stretches: Stretches, edges: Sequence[float]) -> Numbers:
    # A stretch belongs to the part that contains its first point. Returns for each part the first position, the mean,
    # and the smallest and the largest value; NaN if it is empty.
    found = np.full((len(edges) - 1, 4), math.nan)
    places = np.searchsorted(edges, stretches.first[:, 0], side="right") - 1
    places = places.clip(0, len(found) - 1)
    joined = stretches.joined(places)
    values = joined.first[:, 0], joined.total / joined.number, joined.smallest[:, 1], joined.largest[:, 1]
    found[np.unique(places)] = np.column_stack(values)
    return found


class Blame:
    """Which rank has the largest value of one metric, by position on its x axis. All arrays have an item for each row.

    `ranks` are those with the largest value, NaN and the like for none, which exceed the mean over all ranks, `means`
    if it is known, by `excess`.
    """

    def __init__(self, name: str, axis: str, x: Numbers, ranks: Numbers, excess: Numbers, means: Numbers) -> None:
        self.name = name
        self.axis = axis
        part = np.arange(len(x)) // max(1, -(-len(x) // _MOST_PARTS))
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        self._edges = [shortened(edge, 12) for edge in [*x[starts].tolist(), *x[-1:].tolist()]]
        self._number = len(x)  # of all rows
        known = means[np.isfinite(means)]
        self._mean = float(known.mean()) if len(known) else math.nan
        is_rank = (ranks >= 0) & (ranks <= _LARGEST_RANK) & (ranks == np.floor(ranks))
        is_named = is_rank & (excess >= 0) & np.isfinite(excess)
        of_named, part_of_named, excess = ranks[is_named].astype(int), part[is_named], excess[is_named]
        found, which = np.unique(of_named, return_inverse=True)
        self.rows: Counter[int] = Counter(dict(zip(found.tolist(), np.bincount(which).tolist(), strict=True)))
        self._excess = dict(zip(found.tolist(), np.bincount(which, excess).tolist(), strict=True))  # in all rows
        # By how much the ranks with the largest sums exceed the mean in each part, per row.
        worst, parts = np.sort(np.array(self._worst(), int)), len(starts)
        is_shown = np.isin(of_named, worst)
        cell = np.searchsorted(worst, of_named[is_shown]) * parts + part_of_named[is_shown]
        sums = np.bincount(cell, excess[is_shown], len(worst) * parts).reshape(len(worst), parts)
        self._parts = dict(zip(worst.tolist(), (sums / np.bincount(part)).tolist(), strict=True))

    def _worst(self) -> list[int]:
        return sorted(self.rows, key=self._excess.__getitem__)[-_MOST_RANKS:]

    def heat_map(self, world: int | None) -> Part | None:
        """Return by how much the largest value exceeds the mean, per row of each part, counted for its rank only."""
        if not self.rows:
            return None
        size = max(max(self.rows) + 1, world or 0)
        shown = range(size) if size <= _MOST_RANKS else self._worst()
        rows = [self._parts.get(rank, [0.0] * (len(self._edges) - 1)) for rank in shown]
        cells: list[list[float | None]] = [[shortened(cell, 4) for cell in row] for row in rows]
        places = {"axis": self.axis, "ranks": [f"rank {rank}" for rank in shown], "edges": self._edges}
        return {"name": self.name, "kind": "excess", **places, "cells": cells}

    def slowest(self, world: int | None) -> Part | None:
        """Return the ranks that have the largest value too often, else the most often; `None` if no row names one."""
        if not self.rows:
            return None
        slow = slow_ranks(Timing(self.rows, self._number), max(2, world or 0, max(self.rows) + 1))
        is_judged = self.name == RANK  # its rows name a rank only if it delays the others
        ranks = slow if slow and not is_judged else [max(self.rows, key=lambda rank: (self.rows[rank], -rank))]
        count = sum(self.rows[rank] for rank in ranks)
        excess = sum(self._excess[rank] for rank in ranks) / count
        relative = excess / self._mean if self._mean > 0 else math.nan
        stands_out = is_judged or (bool(slow) and not relative <= _NOTICEABLE)
        return {
            "name": self.name,
            "ranks": ranks[:_MOST_RANKS],
            "who": named(ranks),
            "share": count / self._number,  # of the rows in which one of them has the largest value
            "excess": excess,  # by how much that exceeds the mean over all ranks in these rows, on average
            "relative": relative,  # as a share of that mean; NaN if it is not known
            "stands_out": stands_out,  # whether they differ from the others noticeably, more often than by chance
            "by_chance": not slow,
        }
