"""The positions of rows on the x axis.

A row without a step lies at the last step that its rank logged; if there is none, at the rank's number of calls. Ranks
exchange one or the other in the field for the number of calls (`calls_at`). The first position of a resumed run is
added when a row is written; ranks always count their calls from 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from dist_wandb.exchange.protocol.cells import Finished, Key

MOST_CALLS = 2**32 - 1  # the largest number that rounds can send
_AT_STEP = 2**31  # a number of calls from here on is a step: the position of a row without one
_MOST_FAR = 32_768


def calls_at(step: int) -> int:
    """Return the number of calls that stands for a row without a step at the last step before it."""
    return _AT_STEP + step


class XAxis:
    """The positions of the rows of this rank's run on the x axis.

    Args:
        counts: Whether rows without a step lie at the number of calls.
        first: Position of the first row without a step.
    """

    def __init__(self, *, counts: bool = True, first: int = 0) -> None:
        self._counts = counts
        self._first = first
        self._far: OrderedDict[Key, int] = OrderedDict()
        self._farthest = MOST_CALLS

    def keep_far(self, keys: Iterable[Key], calls: int) -> None:
        """Remember steps that are too large to be sent to other ranks, for the rows that this rank writes."""
        self._far.update(dict.fromkeys(keys, calls))
        self._farthest = max(self._farthest, calls)
        while len(self._far) > _MOST_FAR:
            self._far.popitem(last=False)

    def x(self, step: int | None, calls: int) -> int | None:
        """Return the position of a row; `None` for none."""
        if step is None and calls >= _AT_STEP:
            return calls - _AT_STEP
        return self._first + calls if step is None and self._counts else step

    def x_of(self, value: Finished) -> int | None:
        """Return the position of the row of a finished value."""
        position = value.key.position
        return self.x(None if position.counted else position.step, self._calls(value))

    def row_of(self, value: Finished) -> tuple[int, int]:
        """Return a key that the finished values of one row share."""
        position = value.key.position
        return (1, self._calls(value)) if position.counted else (0, position.step)

    def shown(self, value: Finished) -> str:
        """Return the position of a finished value, for messages."""
        position, calls = value.key.position, value.calls
        if position.counted and calls < _AT_STEP:
            return f"row {calls + 1}"
        return f"step {self.x(None if position.counted else position.step, calls)}"

    def _calls(self, value: Finished) -> int:
        return self._far.get(value.key, self._farthest) if value.calls == MOST_CALLS else value.calls
