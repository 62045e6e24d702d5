"""Waiting for what other ranks write into the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at the store


class Stopped(Exception):  # noqa: N818  # no error: somebody asked for it
    """Waiting was to end at once."""


def look_until(look: Callable[[], _T | None], within: float, is_stopped: Callable[[], bool]) -> _T | None:
    """Look again and again until there is something to see; `None` when the time is over.

    Args:
        look: What is looked for; `None` as long as it is not there.
        within: How long to wait, in seconds.
        is_stopped: Whether waiting is to end at once.

    Raises:
        Stopped: Waiting was to end.
    """
    deadline = time.monotonic() + within
    pause = _FIRST_PAUSE
    while True:
        seen = look()
        if seen is not None:
            return seen
        if is_stopped():
            raise Stopped
        if time.monotonic() >= deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
