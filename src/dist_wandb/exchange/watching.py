"""The exchange of a rank that writes nothing, because only the primary's rows are written, unless that rank is missing.

Its rows are kept until it is certain that the primary has opened a session. If it has not, they are passed on to the
session in which this one continues, and another rank's rows are written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from dist_wandb.exchange.interface import Demand, Exchange, is_set_within
from dist_wandb.exchange.rows import Contribution
from dist_wandb.settings.limits import Limits

_log = logging.getLogger("dist_wandb")

Succeed = Callable[[Callable[[], bool], Callable[[], bool]], None]
"""Waits for the primary, on the thread, and moves the session if it is missing; see `session.moving.succeed`."""


class WatchingExchange(Exchange):
    """The exchange of a rank that writes nothing, unless the primary is missing."""

    def __init__(self, limits: Limits, rank: int, succeed: Succeed) -> None:
        super().__init__(limits, rank, "watching")
        self._succeed = succeed
        self._kept: deque[Contribution] | None = deque()
        self._dropped = 0

    def put(self, contribution: Contribution) -> None:
        """Keep a row, or drop it if another rank writes the run."""
        kept = self._kept
        if kept is not None and len(kept) < self._limits.max_pending_rows:
            kept.append(contribution)
        elif kept is not None:
            self._dropped += 1

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait only if the session has moved."""
        successor = self._lifecycle.successor
        return successor is None or successor.flush(timeout, together=together)

    def pass_on(self, successor: Exchange) -> None:
        """Give the rows that were kept to the exchange with which the session continues."""
        super().pass_on(successor)
        while self._kept:
            successor.put(self._kept.popleft())
        dropped, self._dropped = self._dropped, 0
        if dropped:
            successor.lose(dropped, "see max_pending_rows")

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait until it is certain which rank writes the run."""
        if self._is_foreign:
            return True
        self._lifecycle.has_failed = failed
        self._ask(Demand.CLOSE)
        has_ended = failed or is_set_within(self._lifecycle.ended, self._limit(timeout), lambda: False)
        self._ask(Demand.STOP)
        return has_ended

    def _is_stopped(self) -> bool:
        is_unused = self._lifecycle.is_closing and not self._kept
        return is_unused or self._lifecycle.has_failed or self._lifecycle.is_stopped

    def _run(self) -> None:
        lifecycle = self._lifecycle
        try:
            self._succeed(lambda: lifecycle.is_closing, self._is_stopped)
        except Exception:  # noqa: BLE001  # the training must continue
            _log.exception("dist_wandb: rank %d cannot open the run, which no rank writes", self._rank)
        finally:
            self._kept = None
            lifecycle.end()
