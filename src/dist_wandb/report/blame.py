"""Find which rank had the largest value, when, and by how much, in rows that name only one rank.

Of values that were reduced over ranks a row contains the mean, the maximum and the rank with the maximum. So it shows
of that one rank by how much it exceeds the others.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from dist_wandb.report.model import HeatMap, Slowest, shortened

STRAGGLER = "time/straggler"
"""Name of the metric of timings whose rows name a rank only if it delays the others."""

_MOST_PARTS = 128  # of the x axis
_MOST_RANKS = 1024  # of one heat map
_LARGEST_RANK = 1_000_000
_CLEAR = 5.0  # standard deviations above the expected count
_FEWEST_ROWS = 8  # for a rank to stand out
_NOTICEABLE = 0.05  # share of the mean
_MAJORITY = 0.5  # share of the rows, for a rank to stand out


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
        self._rows: Counter[int] = Counter()  # by rank, those in which it has the largest value
        self._excess: Counter[int] = Counter()
        self._mean = 0.0  # sum of the means of the rows that have one
        self._means = 0

    def add(self, x: float, rank: float, excess: float, mean: float = math.nan) -> None:
        """Add a row in which `rank` has the largest value: `excess` above the mean over all ranks, `mean`, if known.

        A `rank` that is NaN or negative is none.
        """
        if not self._parts or self._parts[-1].rows >= self._rows_of_each:
            if len(self._parts) == _MOST_PARTS:
                self._join_neighbours()
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
        self._rows[index] += 1

    def heat_map(self, world: int | None) -> HeatMap | None:
        """Return by how much each rank exceeds the mean, per row; `None` if no row names a rank."""
        if not self._rows:
            return None
        size = max(max(self._rows) + 1, world or 0)
        shown = range(size) if size <= _MOST_RANKS else sorted(self._rows, key=self._excess.__getitem__)[-_MOST_RANKS:]
        cells: list[list[float | None]] = [
            [shortened(part.excess.get(rank, 0.0) / part.rows, 4) for part in self._parts] for rank in shown
        ]
        edges = [shortened(part.begin, 12) for part in self._parts] + [shortened(self._end, 12)]
        return HeatMap(self.name, "excess", self.axis, [f"rank {rank}" for rank in shown], edges, cells)

    def slowest(self, world: int | None) -> Slowest | None:
        """Return the rank that has the largest value most often; `None` if no row names a rank."""
        if not self._rows:
            return None
        rows = sum(part.rows for part in self._parts)
        rank, count = max(self._rows.items(), key=lambda item: (item[1], -item[0]))
        excess = self._excess[rank] / count
        mean = self._mean / self._means if self._means else math.nan
        relative = excess / mean if mean > 0 else math.nan
        ranks = max(2, world or 0, max(self._rows) + 1)
        chance = 1 / ranks
        clear = rows * chance + _CLEAR * math.sqrt(rows * chance * (1 - chance))
        is_judged = self.name == STRAGGLER  # by the rule for timings, row by row
        stands_out = is_judged or (
            rows >= _FEWEST_ROWS
            and count > clear
            and count > rows * _MAJORITY
            and (math.isnan(relative) or relative > _NOTICEABLE)
        )
        return Slowest(self.name, rank, count / rows, excess, relative, stands_out)

    def _join_neighbours(self) -> None:
        for one, other in zip(self._parts[::2], self._parts[1::2], strict=True):
            one.rows += other.rows
            one.excess.update(other.excess)
        self._parts = self._parts[::2]
        self._rows_of_each *= 2
