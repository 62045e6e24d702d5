"""Waiting for what other ranks write into the job's store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dist_wandb.store.polling import poll

_T = TypeVar("_T")
_LONGEST_PAUSE = 0.05  # seconds between two looks at the store


class Stopped(Exception):  # noqa: N818  # no error: somebody asked for it
    """Waiting was to end at once."""


def look_until(look: Callable[[], _T | None], within: float, is_stopped: Callable[[], bool]) -> _T | None:
    """Poll until there is something; `None` when the time is over.

    Args:
        look: What is looked for; `None` as long as it is not there.
        within: How long to wait, in seconds.
        is_stopped: Whether waiting is to end at once.

    Raises:
        Stopped: Waiting was to end.
    """

    def look_unless_stopped() -> _T | None:
        found = look()
        if found is None and is_stopped():
            raise Stopped
        return found

    return poll(look_unless_stopped, within, _LONGEST_PAUSE)
