"""The exchange that combines the numbers of several ranks, as the user's threads see it.

Its thread takes part in rounds (`worker`). Nothing here performs a collective or waits for another rank, except `flush`
and `close`, which have a time limit.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time

from dist_wandb.exchange.interface import Demand, Exchange, Flush, Phase, grace_of_failed, is_set_within, write_rest
from dist_wandb.exchange.participation import UNOPENED
from dist_wandb.exchange.protocol.pacing import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.reports import Context, Reports
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.transport.group import Group
from dist_wandb.exchange.worker import Hooks, Worker
from dist_wandb.settings.limits import Limits
from dist_wandb.settings.plan import Unit

_BROKEN = Phase.BROKEN  # a member of an enumeration takes longer to read
_LAST_ROUND = 1.0  # seconds that an exiting process gives the others to end as well
_OFTEN = 64  # every so many rows, `log` checks whether too many wait: counting them takes longer than passing one on
_POLL_INTERVAL = 0.5  # seconds between two checks whether others still need this process


class CollectiveExchange(Exchange):
    """One rank's part in the exchange of its unit, as seen from this rank."""

    def __init__(self, unit: Unit, hooks: Hooks, rows: Rows, limits: Limits) -> None:
        super().__init__(limits, unit.global_rank, unit.name or "unit")
        self.rounds: Rounds = Rounds(
            unit.index,
            unit.size,
            needs_primary=rows.attachments.needs_primary,
            most_open=limits.max_pending_rows,
            hold=2 * limits.linger,
        )
        self._hooks = hooks
        self._rows = rows
        self._puts = 0
        reports = Reports(max(limits.peer_timeout, NEW_NAME_HEARTBEATS * limits.heartbeat), time.monotonic)
        if not hooks.names_unopened:
            reports.is_first(UNOPENED)
        self._worker = Worker(Context(unit, limits, rows, reports, self._lifecycle), self.rounds, hooks)

    def start(self) -> None:
        """Start the thread; from now on, it calls the session's functions."""
        # The transport is imported here, if torch is already: on the thread, that might happen while Python exits after
        # Ctrl-C, which it then forgets: it would exit with code 1 (`_Py_UnhandledKeyboardInterrupt`, reset by
        # `run_eval_code_obj` in CPython's Python/pythonrun.c).
        torch_distributed = sys.modules.get("torch.distributed")
        if torch_distributed is not None and torch_distributed.is_available():
            importlib.import_module("dist_wandb.exchange.transport.tree")  # which imports `gloo`
        super().start()

    def put(self, contribution: Contribution) -> None:
        if self._lifecycle.phase is not _BROKEN:
            self._worker.inbox.put(contribution)
            self._puts += 1
            if self._puts % _OFTEN == 0:
                self._worker.turns.await_room()

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        lifecycle = self._lifecycle
        if self._is_foreign or lifecycle.ended.is_set():
            return lifecycle.has_kept_all
        flush = Flush(together=together)
        self._worker.inbox.wake(flush)
        is_set = is_set_within(flush, self._limit(timeout), lifecycle.ended.is_set)
        if lifecycle.successor is not None:
            return lifecycle.successor.flush(timeout, together=together)
        return is_set and lifecycle.has_kept_all and not self._worker.cycle.keeps_rows

    def pass_on(self, successor: Exchange) -> None:
        super().pass_on(successor)
        self._worker.inbox.pass_on(successor.put)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """End the exchange: a rank that writes waits for all others, any other rank until everything is delivered."""
        if self._is_foreign:
            return True
        lifecycle, cycle = self._lifecycle, self._worker.cycle
        lifecycle.has_failed = lifecycle.has_failed or failed
        self._ask(Demand.CLOSE)
        limit = self._limit(timeout)
        if failed:
            limit = min(limit, grace_of_failed(self._limits))
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
        messages, flagged = self._worker.messages, self._rows.writing.marked
        if cycle.keeps_rows:
            messages.primary_stays_away(limit, cycle.kept_after)
        messages.overdue = f"within finish_timeout ({limit:.3g} s). Pass a larger finish_timeout, or log less often"
        self._stop()
        if not cycle.keeps_rows and lifecycle.has_kept_all:
            messages.time_is_over(limit, self._rows.writing.marked - flagged)  # what has happened to the rows
        return False

    def _await_end(self, ended: threading.Event, limit: float) -> bool:
        deadline = time.monotonic() + limit  # without the time in which the rank that writes opens its run
        while not ended.wait(min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic()))):
            lifecycle = self._lifecycle
            may_open = not (self._rows.writes or lifecycle.is_stopped or self._worker.participation.generation)
            if lifecycle.phase is Phase.MOVING or (may_open and not lifecycle.has_failed and self._hooks.is_opening()):
                deadline = time.monotonic() + limit
            elif time.monotonic() >= deadline:
                return ended.is_set()
        return True

    def _stop_at_exit(self, within: float, *, failed: bool) -> None:
        lifecycle, deadline = self._lifecycle, time.monotonic() + within
        if not failed:  # ranks that are behind have yet to request what belongs to this rank's values
            while lifecycle.is_needed and time.monotonic() < deadline and not lifecycle.ended.wait(_POLL_INTERVAL):
                pass
        if not lifecycle.ended.wait(_LAST_ROUND) and not self._rows.writing.is_over:
            self._stop()

    @property
    def group(self) -> Group | None:
        """The participating ranks; `None` if there are none yet."""
        return self._worker.cycle.group

    @property
    def lost(self) -> frozenset[int]:
        return self._worker.participation.attendance.lost

    @property
    def unmet(self) -> frozenset[int]:
        return self._worker.participation.attendance.unmet

    @property
    def is_only_one(self) -> bool:
        """Whether the exchange has ended without any other rank having opened a session."""
        return self._worker.participation.attendance.is_only_one and self._lifecycle.ended.is_set()

    def _ask(self, demand: Demand) -> None:
        super()._ask(demand)
        self._worker.inbox.wake()

    def _stop(self, interrupt: KeyboardInterrupt | None = None) -> None:
        """Wait for no other rank any longer, and until what is left is written: see `write_rest`."""
        self._ask(Demand.STOP)
        try:
            write_rest(self._lifecycle, self._worker.turns.left, self._rank, interrupt)
        finally:
            self._rows.writing.is_over = not self._lifecycle.ended.is_set()

    def _run(self) -> None:
        self._worker.run()
