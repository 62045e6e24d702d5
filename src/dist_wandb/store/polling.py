"""Polling with a timeout and growing pauses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE = 0.001  # seconds between the first two calls
_SHARE = 0.1  # long pauses, as a share of the time waited so far
_SLOWEST = 0.5  # maximum seconds between two calls
_RANKS_AT_ONCE = 200  # number of ranks whose first calls the store can serve within the first pause
_RANKS = 256  # number of ranks up to which the store can serve all calls without longer pauses
_SLOWEST_OF_MANY = 5.0  # maximum seconds between two calls for any number of ranks


def poll(
    query: Callable[[], _T | None],
    within: float,
    longest_pause: float,
    ranks: int = 1,
    sleep: Callable[[float], None] | None = None,
) -> _T | None:
    """Call `query` until it returns something other than `None`, up to `within` seconds; return that, or `None`.

    The pause between two calls doubles up to the longest one, in seconds; then it grows with the time waited. It is
    longer if many `ranks` poll at the same time.
    """
    began, pause = time.monotonic(), first_pause(longest_pause, ranks)
    while (found := query()) is None and (waited := time.monotonic() - began) < within:
        (sleep or time.sleep)(min(pause, within - waited))
        pause = next_pause(pause, waited, longest_pause, ranks)
    return found


def first_pause(longest_pause: float, ranks: int) -> float:
    """Return the pause between the first two calls, in seconds; see `poll`."""
    return min(_FIRST_PAUSE * max(1.0, ranks / _RANKS_AT_ONCE), longest_pause)


def next_pause(pause: float, waited: float, longest_pause: float, ranks: int) -> float:
    """Return the pause after a pause, in seconds; see `poll`."""
    return min(2 * pause, max(longest_pause, min(_SHARE * waited, interval(_SLOWEST, ranks))))


def interval(seconds: float, ranks: int) -> float:
    """Return the interval at which each of many ranks may poll the job's store; it is `seconds` for up to 256 ranks."""
    return max(seconds, min(seconds * ranks / _RANKS, _SLOWEST_OF_MANY))


class Interval:
    """Permits an action once every `seconds`; if each of many `ranks` polls the job's store then, see `interval`."""

    def __init__(self, seconds: float, ranks: int = 1) -> None:
        self._seconds = interval(seconds, ranks)
        self._last = -math.inf

    def is_over(self, now: float) -> bool:
        """Return whether the interval is over; if so, begin the next one."""
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
