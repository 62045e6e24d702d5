"""Waiting for values that other ranks write to the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dist_wandb.store.polling import poll

_T = TypeVar("_T")
_LONGEST_PAUSE = 0.05  # seconds between two polls of the store at first, and between two checks whether to stop


class Stopped(Exception):  # noqa: N818  # not an error: it was requested
    """Waiting was stopped."""


def poll_until_stopped(
    query: Callable[[], _T | None],
    within: float,
    is_stopped: Callable[[], bool],
    ranks: int = 1,
    is_urgent: Callable[[], bool] = lambda: False,
) -> _T | None:
    """Poll like `store.polling.poll`, but raise Stopped as soon as `is_stopped` returns true.

    If `is_urgent` returns true, poll immediately, without the rest of the pause.
    """
    found = poll(query, within, _LONGEST_PAUSE, ranks, lambda seconds: _sleep(seconds, is_stopped, is_urgent))
    if found is None and is_stopped():
        raise Stopped
    return found


def _sleep(seconds: float, is_stopped: Callable[[], bool], is_urgent: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while True:
        if is_stopped():
            raise Stopped
        left = until - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, _LONGEST_PAUSE))
        if is_urgent():
            return
