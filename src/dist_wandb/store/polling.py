"""Poll until something is there, for at most a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE = 0.001  # seconds


def poll(look: Callable[[], _T | None], within: float, longest_pause: float) -> _T | None:
    """Call `look` until it returns something; what it raises ends the loop.

    Args:
        look: Returns `None` as long as there is nothing.
        within: How long to poll, in seconds.
        longest_pause: Up to how many seconds the pause between two calls doubles.

    Returns:
        What `look` returned; `None` when the time is over.
    """
    deadline, pause = time.monotonic() + within, min(_FIRST_PAUSE, longest_pause)
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)
    return found
