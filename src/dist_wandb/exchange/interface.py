"""What a session uses an exchange by, and what all exchanges share: waiting for a flush, and the end with the process.

An exchange brings what a rank logs to the rows of a run. `CollectiveExchange` brings the ranks' numbers together,
`DirectExchange` writes one rank's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from dist_wandb.exchange.posting import Contribution
from dist_wandb.store.timed_caller import settle

WITHOUT_FINISH = 10.0  # seconds that a process which ends waits at most for others, if nobody finished its session
DEVICE_POLL_INTERVAL = 0.005  # seconds between two looks whether a device has computed what was logged
_SLICE = 0.2  # seconds between two looks whether waiting is to end
_LAST_ANSWERS = 3.0  # seconds that calls of the store which were given up get to come back, when the process ends


class Exchange(Protocol):
    """Takes the contributions of one rank and sees to it that finished rows are written, in order."""

    def start(self) -> None:
        """Begin, once the session is complete."""

    def put(self, contribution: Contribution) -> None:
        """Take a contribution. Does not wait for other ranks."""

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait up to `timeout` seconds until all that was put, or all that any rank put, is written; whether it is."""

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """As `flush`; nothing may be put afterwards. After a failure nobody is waited for."""

    def detach(self) -> None:
        """Say that nothing more comes, without waiting: there is no run to write into any more."""

    def leave(self, *, failed: bool = False) -> None:
        """End with this process, after a failure or not."""

    @property
    def lost(self) -> frozenset[int]:
        """Indices in the unit of ranks that took part, and are gone without having finished."""

    @property
    def has_ended(self) -> bool:
        """Whether its thread has ended."""


class Flush(threading.Event):
    """A pending flush request; set when all that was put before it is written.

    Args:
        together: Whether all ranks flush at the same point.
    """

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.together = together


def is_set_within(event: threading.Event, seconds: float, gives_up: Callable[[], bool]) -> bool:
    """Wait for an event.

    Args:
        event: The event.
        seconds: How long to wait.
        gives_up: Asked now and then: whether waiting is to end.

    Returns:
        Whether the event is set.
    """
    deadline = time.monotonic() + seconds
    while not event.wait(min(_SLICE, max(0.0, deadline - time.monotonic()))):
        if gives_up() or time.monotonic() >= deadline:
            return event.is_set()
    return True


_live: list[Exchange] = []


def remember(exchange: Exchange) -> None:
    """Have the thread of an exchange ended with the process, should it still be there."""
    _live[:] = [known for known in _live if not known.has_ended]
    _live.append(exchange)


def end_all(*, failed: bool) -> None:
    """End the threads of this process, because it ends: those of finished sessions may still serve other ranks.

    Args:
        failed: Whether the process ends by a failure, so that nobody is waited for.
    """
    for exchange in reversed(_live):
        exchange.leave(failed=failed)
    settle(_LAST_ANSWERS)
