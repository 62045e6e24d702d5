"""Poll until something is there, for at most a given time, and the less often the longer it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE = 0.001  # seconds between the first two looks
_SHARE = 0.1  # of the time waited so far: how long a pause becomes
_SLOWEST = 0.5  # seconds between two looks at last
_RANKS_AT_ONCE = 200  # ranks whose first looks the store answers within the first pause
_RANKS = 256  # up to which the store answers all ranks as often as they look
_SLOWEST_OF_MANY = 5.0  # seconds between two looks of a rank, however many they are


def poll(look: Callable[[], _T | None], within: float, longest_pause: float, ranks: int = 1) -> _T | None:
    """Call `look` until it returns something; what it raises ends the loop.

    Args:
        look: Returns `None` as long as there is nothing.
        within: How long to poll, in seconds.
        longest_pause: Up to how many seconds the pause between two calls doubles; later it grows with the time waited.
        ranks: How many ranks poll with this one.

    Returns:
        What `look` returned; `None` when the time is over.
    """
    began, pause = time.monotonic(), first_pause(longest_pause, ranks)
    while (found := look()) is None and (waited := time.monotonic() - began) < within:
        time.sleep(min(pause, within - waited))
        pause = next_pause(pause, waited, longest_pause, ranks)
    return found


def first_pause(longest_pause: float, ranks: int) -> float:
    """How long to wait between the first two looks, in seconds; arguments as of `poll`."""
    return min(_FIRST_PAUSE * max(1.0, ranks / _RANKS_AT_ONCE), longest_pause)


def next_pause(pause: float, waited: float, longest_pause: float, ranks: int) -> float:
    """How long to wait after a pause, in seconds; arguments as of `poll`."""
    return min(2 * pause, max(longest_pause, min(_SHARE * waited, interval(_SLOWEST, ranks))))


def interval(seconds: float, ranks: int) -> float:
    """How often each of many ranks may look at the job's store: its work must not grow beyond what it can do.

    Args:
        seconds: How often each of up to 256 ranks may, in seconds.
        ranks: How many they are.
    """
    return max(seconds, min(seconds * ranks / _RANKS, _SLOWEST_OF_MANY))
