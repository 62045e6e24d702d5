"""Waiting for what other ranks write into the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dist_wandb.store.polling import first_pause, next_pause

_T = TypeVar("_T")
_LONGEST_PAUSE = 0.05  # seconds between two looks at the store, at first; between two looks whether waiting is to end


class Stopped(Exception):  # noqa: N818  # no error: somebody asked for it
    """Waiting was to end at once."""


def look_until(
    look: Callable[[], _T | None],
    within: float,
    is_stopped: Callable[[], bool],
    ranks: int = 1,
    is_urgent: Callable[[], bool] = lambda: False,
) -> _T | None:
    """Poll until there is something; `None` when the time is over.

    Args:
        look: What is looked for; `None` as long as it is not there.
        within: How long to wait, in seconds.
        is_stopped: Whether waiting is to end at once.
        ranks: How many ranks wait with this one: the more they are, the less often each looks.
        is_urgent: Whether to look often again.

    Raises:
        Stopped: Waiting was to end.
    """
    began = time.monotonic()
    pause = first_pause(_LONGEST_PAUSE, ranks)
    while (found := look()) is None and (waited := time.monotonic() - began) < within:
        _rest(min(pause, within - waited), is_stopped, is_urgent)
        pause = next_pause(pause, waited, _LONGEST_PAUSE, ranks)
    if found is None and is_stopped():
        raise Stopped
    return found


def _rest(seconds: float, is_stopped: Callable[[], bool], is_urgent: Callable[[], bool]) -> None:
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
