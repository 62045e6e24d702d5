"""The exchange that combines the numbers of several ranks, as the user's threads see it.

Its thread takes part in rounds (`worker`). Nothing here performs a collective or waits for another rank, except `flush`
and `close`, which have a time limit.
"""

from __future__ import annotations

import os
import threading
import time

from dist_wandb.exchange.forming import import_gloo
from dist_wandb.exchange.interface import (
    LAST_WRITES,
    WITHOUT_FINISH,
    Demand,
    Flush,
    Lifecycle,
    Phase,
    is_set_within,
    remember,
    write_rest,
)
from dist_wandb.exchange.participation import UNOPENED
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.protocol.pacing import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.reports import Context, Reports
from dist_wandb.exchange.rows import Rows
from dist_wandb.exchange.transport.group import Group
from dist_wandb.exchange.worker import Hooks, Worker
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit

_LAST_ROUND = 1.0  # seconds that an exiting process gives the others to end as well
_LONGEST_GRACE = 3.0  # seconds, for any heartbeat
_LAST_ROUNDS = 0.5  # seconds that a failed rank gets, after a heartbeat, to hand over what it has logged
_POLL_INTERVAL = 0.5  # seconds between two checks whether others still need this process


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
        self._unit = unit
        self._hooks = hooks
        self._limits = limits
        self._rows = rows
        self._lifecycle = Lifecycle()
        reports = Reports(max(limits.peer_timeout, NEW_NAME_HEARTBEATS * limits.heartbeat), time.monotonic)
        if not hooks.names_unopened:
            reports.is_first(UNOPENED)
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
            self._worker.turns.await_room()

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
        return is_set and self._lifecycle.has_kept_all and not self._worker.output.keeps_rows

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """End the exchange. A rank that writes waits for all others, any other rank until everything is delivered.

        See `Exchange.close`.
        """
        if self._is_foreign():
            return True
        lifecycle, output = self._lifecycle, self._worker.output
        lifecycle.has_failed = lifecycle.has_failed or failed
        self._ask(Demand.CLOSE)
        limit = self._limits.flush_timeout if timeout is None else timeout
        if failed:
            limit = min(limit, self._limits.heartbeat + _LAST_ROUNDS, _LONGEST_GRACE)
        try:
            ended = lifecycle.ended if self._rows.writes and not failed else lifecycle.delivered
            if self._await_end(ended, limit) and not failed and not lifecycle.is_stopped:
                return lifecycle.has_kept_all
        except KeyboardInterrupt as error:
            lifecycle.has_failed = True
            self._stop(error)
        if failed:
            self._stop()
            return lifecycle.has_kept_all
        messages, flagged = self._worker.messages, self._rows.held.marked.total()
        if output.keeps_rows:
            messages.primary_stays_away(limit, output.kept_after)
        messages.overdue = f"within finish_timeout ({limit:.3g} s). Pass a larger finish_timeout, or log less often"
        self._stop()
        if not output.keeps_rows and self._lifecycle.has_kept_all:
            messages.time_is_over(limit, self._rows.held.marked.total() - flagged)  # what has happened to the rows
        return False

    def _await_end(self, ended: threading.Event, limit: float) -> bool:
        """Wait for the end, and return whether it came.

        While the rank that writes opens its run, also in place of another, the time does not count: W&B may take longer
        for it than `limit`.
        """
        deadline = time.monotonic() + limit
        while not ended.wait(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            lifecycle = self._lifecycle
            may_open = not (self._rows.writes or lifecycle.is_stopped or self._worker.participation.generation)
            if lifecycle.phase is Phase.MOVING or (may_open and not lifecycle.has_failed and self._hooks.is_opening()):
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                return ended.is_set()
        return True

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
        if not self._lifecycle.ended.wait(_LAST_ROUND) and not self._rows.writing.is_over:
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
        """Indices in the unit of ranks that opened a session, and are gone without having finished."""
        return self._worker.participation.attendance.lost

    @property
    def unwritten(self) -> int:
        """Number of rows that were put, and that `close` has given up."""
        return self._lifecycle.unwritten

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

    def _stop(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Wait for no other rank any longer, and until what is left is written: see `write_rest`."""
        self._ask(Demand.STOP)
        left, rank = self._worker.turns.left, self._unit.global_rank
        try:
            write_rest(self._lifecycle, left, rank, LAST_WRITES, interrupt)
        finally:
            self._rows.writing.is_over = not self._lifecycle.ended.is_set()

    def _is_foreign(self) -> bool:
        """Return whether this process is a fork, in which the thread does not exist."""
        return os.getpid() != self._pid
