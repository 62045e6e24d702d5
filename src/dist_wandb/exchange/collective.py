"""The exchange that combines the numbers of several ranks, as the user's threads see it.

Its thread takes part in rounds (`worker`). Nothing here performs a collective or waits for another rank, except `flush`
and `close`, which have a time limit.
"""

from __future__ import annotations

import os
import threading
import time

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.forming import import_gloo
from dist_wandb.exchange.interface import WITHOUT_FINISH, Flush, is_set_within, remember
from dist_wandb.exchange.lifecycle import LAST_WRITES, Demand, Lifecycle, Phase
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.protocol.pacing import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.reports import Reports
from dist_wandb.exchange.rows import Rows
from dist_wandb.exchange.transport.group import Group
from dist_wandb.exchange.worker import Hooks, Worker
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit

_LAST_ROUND = 1.0  # seconds that an exiting process gives the others to end as well
_POLL_INTERVAL = 0.5  # seconds between two checks whether others still need this process
_MORE_TIME = 1.2  # factor on the estimated time to write the rows that the others have not received
_MOST_WRITING = 0.5  # maximum share of the time for `finish` that is reserved for it


class CollectiveExchange:
    """One rank's part in the exchange of its unit.

    Args:
        unit: The unit, seen from this rank.
        hooks: The session's functions that the thread calls.
        rows: Makes totals of contributions, and rows of finished values.
        limits: Timeouts and queue limits.
    """

    def __init__(self, unit: Unit, hooks: Hooks, rows: Rows, limits: Limits) -> None:
        self.rounds: Rounds = Rounds(
            unit.index,
            unit.size,
            needs_primary=rows.held.attachments.needs_primary,
            most_open=limits.max_pending_rows,
            hold=2 * limits.linger,
        )
        self._hooks = hooks
        self._limits = limits
        self._rows = rows
        self._lifecycle = Lifecycle()
        reports = Reports(max(limits.peer_timeout, NEW_NAME_HEARTBEATS * limits.heartbeat), time.monotonic)
        context = Context(unit, limits, rows, reports, self._lifecycle)
        self._worker = Worker(context, self.rounds, hooks)
        self._inbox = self._worker.inbox
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._worker.run, name=f"dist_wandb-{unit.name or 'unit'}", daemon=True)

    def start(self) -> None:
        """Start the thread; from now on, it calls the session's functions."""
        import_gloo()
        self._thread.start()
        remember(self)

    def put(self, contribution: Contribution) -> None:
        """Hand a contribution to the thread."""
        if self._lifecycle.phase is not Phase.BROKEN:
            self._inbox.put(contribution)

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait until everything that this rank has logged is finished; see `Exchange.flush`."""
        if self._is_foreign() or self._lifecycle.ended.is_set():
            return self._lifecycle.has_kept_all
        flush = Flush(together=together)
        self._inbox.wake(flush)
        limit = self._limits.flush_timeout if timeout is None else timeout
        is_set = is_set_within(flush, limit, self._lifecycle.ended.is_set)
        if self._lifecycle.successor is not None:
            return self._lifecycle.successor.flush(timeout, together=together)
        return is_set and self._lifecycle.has_kept_all

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """End the exchange. A rank that writes waits for all others, any other rank until everything is delivered.

        See `Exchange.close`.
        """
        if self._is_foreign():
            return True
        self._ask(Demand.ABORT if failed else Demand.CLOSE)
        limit = self._limits.flush_timeout if timeout is None else timeout
        if failed:
            limit = min(limit, LAST_WRITES)
        if self._await_end(limit) and not self._lifecycle.is_stopped:
            return self._lifecycle.has_kept_all
        if not failed:
            output = self._worker.output
            if output.keeps_rows:
                self._worker.messages.primary_stays_away(limit, output.kept_after)
            else:
                self._worker.messages.time_is_over(limit, self._worker.turns.backlog)
        self._stop(self._time_to_write(limit))
        return False

    def _await_end(self, limit: float) -> bool:
        """Wait until everything is written or delivered; reserve time to write what the others have not received.

        While the rank that writes opens its run, the time does not count: W&B may take longer for it than `limit`.
        """
        ended = self._lifecycle.ended if self._rows.writes else self._lifecycle.delivered
        deadline = time.monotonic() + limit
        while not ended.wait(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            is_waiting = not (self._rows.writes or self._lifecycle.is_stopped or self._worker.participation.generation)
            if is_waiting and self._hooks.is_opening():
                deadline = time.monotonic() + limit
            elif deadline - time.monotonic() <= self._time_to_write(limit):
                return ended.is_set()
        return True

    def _time_to_write(self, limit: float) -> float:
        """Return how long this rank may write its rows without waiting for others any longer, in seconds."""
        rows = self._worker.turns.backlog if self._rows.writes else 0
        return min(_MORE_TIME * self._worker.output.seconds_per_row * rows, _MOST_WRITING * limit)

    def detach(self) -> None:
        """End without waiting; the thread goes through the rounds until all ranks close."""
        if not self._is_foreign():
            self._ask(Demand.CLOSE)

    def leave(self, *, failed: bool = False) -> None:
        """End at process exit.

        A thread in native code at interpreter shutdown aborts the process, so the thread must have ended by then.
        """
        if self._is_foreign():
            return
        within = min(self._limits.flush_timeout, WITHOUT_FINISH)
        if not self._lifecycle.is_closing:
            self.close(within, failed=failed)
        if not failed:
            self._stay_while_needed(within)
        if not self._lifecycle.ended.wait(_LAST_ROUND):
            self._stop()
        self._thread.join(LAST_WRITES)

    def _stay_while_needed(self, within: float) -> None:
        """Wait until ranks that are behind have requested everything that belongs to this rank's values."""
        deadline = time.monotonic() + within
        while (
            self._lifecycle.is_needed and time.monotonic() < deadline and not self._lifecycle.ended.wait(_POLL_INTERVAL)
        ):
            pass

    @property
    def group(self) -> Group | None:
        """The participating ranks; `None` if there are none yet."""
        return self._worker.cycle.group

    @property
    def lost(self) -> frozenset[int]:
        """Indices in the unit of ranks that participated, and are gone without having finished."""
        return self._worker.participation.attendance.lost

    @property
    def is_only_one(self) -> bool:
        """Whether the exchange has ended without any other rank having opened a session."""
        return self._worker.participation.attendance.is_only_one and self._lifecycle.ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _ask(self, demand: Demand) -> None:
        self._lifecycle.ask(demand)
        self._inbox.wake()

    def _stop(self, to_write: float = 0.0) -> None:
        self._ask(Demand.STOP)
        if not self._lifecycle.ended.wait(LAST_WRITES + to_write):
            self._rows.writing.is_over = True

    def _is_foreign(self) -> bool:
        """Return whether this process is a fork, in which the thread does not exist."""
        return os.getpid() != self._pid
