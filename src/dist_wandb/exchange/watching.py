"""The exchange of a rank that writes nothing, because only the primary's rows are written, unless that rank is missing.

Its rows are kept until it is certain that the primary has opened a session. If it has not, they are passed on to the
session in which this one continues, and another rank's rows are written.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from dist_wandb.exchange.interface import Demand, Exchange, Phase, ends, grace_of_failed, is_set_within
from dist_wandb.exchange.rows import Contribution
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit

_log = logging.getLogger("dist_wandb")

Find = Callable[[Callable[[], bool], Callable[[], bool], Callable[[], bool]], "int | None"]
"""Waits, on the thread, until it is certain which rank of the unit writes; see `session.moving.primary_in`."""


class WatchingExchange(Exchange):
    """The exchange of a rank that writes nothing, unless the primary is missing."""

    def __init__(
        self,
        limits: Limits,
        unit: Unit,
        find: Find,
        move: Callable[[int], None],
        failure: Callable[[], str | None] = lambda: None,  # why the primary could not open its run, if it could not
    ) -> None:
        super().__init__(limits, unit.global_rank, "watching")
        self._unit = unit
        self._find = find
        self._move = move  # continues in another exchange, given the rank of its primary
        self._failure = failure
        self._has_rows = False
        self._kept: deque[Contribution] | None = deque()
        self._dropped = 0
        self._writes = False  # whether this rank begins to write the run

    def put(self, contribution: Contribution) -> None:
        """Keep a row, or drop it if another rank writes the run."""
        kept, self._has_rows = self._kept, True
        if kept is not None and len(kept) < self._limits.max_pending_rows:
            kept.append(contribution)
        elif kept is not None:
            self._dropped += 1

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait only if the session has moved."""
        successor = self._lifecycle.successor
        return self._lifecycle.has_kept_all if successor is None else successor.flush(timeout, together=together)

    def pass_on(self, successor: Exchange) -> None:
        """Give the rows that were kept to the exchange with which the session continues."""
        super().pass_on(successor)
        while self._kept:
            successor.put(self._kept.popleft())
        if self._writes and self._dropped:
            message = "dist_wandb: %d rows of rank %d are lost: see max_pending_rows. The run ends as failed."
            _log.warning(message, self._dropped, self._rank)
            successor._lifecycle.unwritten += self._dropped  # noqa: SLF001  # of this base class
            self._dropped = 0

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait until it is certain which rank writes the run; no longer than a heartbeat if the process has failed."""
        if self._is_foreign:
            return True
        lifecycle, limit = self._lifecycle, self._limit(timeout)
        lifecycle.has_failed = failed
        self._ask(Demand.CLOSE)
        limit = min(limit, grace_of_failed(self._limits)) if failed else limit
        is_set_within(lifecycle.ended, limit, lambda: False)
        self._ask(Demand.STOP)
        has_ended = ends(lifecycle, lambda: 0, self._rank)
        if self._has_rows and lifecycle.successor is None and (failure := self._failure()):
            _log.warning(
                "dist_wandb: init failed on rank %d, which has the run to which rank %d logs: %s",
                *(self._unit.global_rank_of(0), self._rank, failure),
            )
        return has_ended and lifecycle.has_kept_all

    def _is_stopped(self) -> bool:
        return (self._lifecycle.is_closing and not self._kept) or self._lifecycle.is_stopped

    def _run(self) -> None:
        lifecycle = self._lifecycle
        try:
            has_rows = lambda: bool(self._kept) and not lifecycle.has_failed  # noqa: E731
            primary = self._find(lambda: lifecycle.is_closing, has_rows, self._is_stopped)
            if primary is None and self._kept:
                lifecycle.may_have_lost = True
                message = (
                    "dist_wandb: what rank %d logged may be lost: it ended before it was certain which rank writes the "
                    "run. Pass primary_rank to init if rank %d does not call it."
                )
                _log.warning(message, self._rank, self._unit.global_rank_of(0))
            if primary:
                lifecycle.phase, self._writes = Phase.MOVING, primary == self._unit.index
                self._move(self._unit.global_rank_of(primary))
        except Exception:  # noqa: BLE001  # the training must continue
            lifecycle.phase = Phase.BROKEN
            _log.exception("dist_wandb: rank %d cannot open the run, which no rank writes", self._rank)
        finally:
            self._kept = None
            lifecycle.end()
