"""Which rank holds the others up, of rows that say how busy the ranks were (`session.sections`). Pure.

Of each row is known, over the ranks, the largest share of the time in which a rank was busy, whose it is, and the mean
of the others. A rank is named when it was the busiest one in 18 of the last 20 rows, and in their middle at least a
tenth busier than the others. Of ranks that are alike another one is the busiest in each row: that the same of 2 is it
in 18 of 20 has a chance of 0.04 %, and it does not differ from the other by a tenth then, unless times vary a lot.
"""

from __future__ import annotations

import statistics
from collections import deque

from dist_wandb.settings.reduction import TIMES

RANK, EXCESS = f"{TIMES}straggler_rank", f"{TIMES}straggler_excess"
_ROWS = 20
_OFTEN = 18  # of these
_LEAST = 0.1  # of the others' time


class Stragglers:
    """The last rows with timings."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, float]] = deque(
            maxlen=_ROWS
        )  # the busiest rank, and by how much of the others' time
        self._more = 0.0

    def add(self, busiest: int, largest: float, others: float) -> None:
        """Note the next row.

        Args:
            busiest: The rank that was busy longest.
            largest: Which share of the time it was busy.
            others: Mean share of the other ranks.
        """
        self._more = largest - others
        self._rows.append((busiest, self._more / others if others > 0 else float(self._more > 0)))

    def detect(self, seconds: float | None) -> dict[str, float]:
        """What the last row says of the rank that holds the others up; nothing where none does.

        Args:
            seconds: What the row covers; mean over ranks. `None` where it is not known.

        Returns:
            The rank, and how many seconds longer than the others it was busy.
        """
        if seconds is None or not self._rows:
            return {}
        busiest, _ = self._rows[-1]
        times = sum(rank == busiest for rank, _ in self._rows)
        if times < _OFTEN or statistics.median(by for _, by in self._rows) < _LEAST:
            return {}
        return {RANK: busiest, EXCESS: self._more * seconds}
