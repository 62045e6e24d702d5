"""Detection of the rank that delays the others, from rows with busy times of all ranks (`session.sections`). Pure.

Each row contains the largest share of the time in which a rank was busy, that rank, and the mean share of the others. A
rank is reported if it was the busiest one in 18 of the last 20 rows, and at the median of these rows busier than the
others by at least a tenth. Among equally fast ranks, the busiest one changes from row to row: that the same of 2 ranks
is the busiest in 18 of 20 rows has a probability of 0.04 %, and it then differs from the other by less than a tenth,
unless times vary a lot.
"""

from __future__ import annotations

import statistics
from collections import deque

from dist_wandb.settings.reduction import TIMES

RANK, EXCESS = f"{TIMES}straggler_rank", f"{TIMES}straggler_excess"
_ROWS = 20
_OFTEN = 18  # of these rows
_LEAST = 0.1  # of the others' time


class Stragglers:
    """The last rows with busy times."""

    def __init__(self) -> None:
        # the busiest rank, and how much longer it was busy, as a fraction of the others' time
        self._rows: deque[tuple[int, float]] = deque(maxlen=_ROWS)
        self._more = 0.0

    def add(self, busiest: int, largest: float, others: float) -> None:
        """Add the next row: the busiest rank, the share of the time that it was busy, and the mean of the others."""
        self._more = largest - others
        self._rows.append((busiest, self._more / others if others > 0 else float(self._more > 0)))

    def detect(self, seconds: float | None) -> dict[str, float]:  # the mean time that the row covers, if known
        """Return the straggler of the last row, if any, and how many seconds longer than the others it was busy."""
        if seconds is None or not self._rows:
            return {}
        busiest, _ = self._rows[-1]
        times = sum(rank == busiest for rank, _ in self._rows)
        if times < _OFTEN or statistics.median(by for _, by in self._rows) < _LEAST:
            return {}
        return {RANK: busiest, EXCESS: self._more * seconds}
