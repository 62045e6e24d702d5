"""The exchange of a rank that writes its own rows only: nothing is combined with other ranks.

It is used in a world of one, in a unit of one rank, with ``reduce=None``, and with ``run_mode="new"`` without a
reduction.

As in wandb, a row to which a step was given stays open for more values of this step, until a row of another step, or
`flush`, or the end.

In a job of several ranks, a thread of the session writes the rows, so that neither a stalled device nor a stalled wandb
process delays the training. In a world of one, they are written on the calling thread, as with wandb alone
(`run.summary` has them at once, unless they stay open). If a device has yet to compute their values, the thread writes
these rows, and those that follow until it is done. In both cases, rows are written in the order in which they were put.

In a shared run, rows are kept until all writers are attached: a writer that attaches after rows were sent may make the
server lose some (wandb issue 12269). With a `CollectiveExchange`, the first generation begins after that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dist_wandb.exchange.interface import (
    LAST_WRITES,
    WITHOUT_FINISH,
    Demand,
    Flush,
    Lifecycle,
    is_set_within,
    remember,
    write_rest,
)
from dist_wandb.exchange.own_rows import OwnRows
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.reports import report_lost
from dist_wandb.exchange.rows import Rows
from dist_wandb.settings.limits import Limits


class DirectExchange:
    """The exchange of a rank that writes its own rows only.

    `put` takes no lock for which a signal handler that interrupts it and logs would wait. `has_all_writers` is called
    on the thread, repeatedly, before anything is written: are the other writers of a shared run attached? `None` if
    there are none to wait for.
    """

    def __init__(
        self,
        rows: Rows,
        limits: Limits,
        rank: int,  # in the job, for messages
        *,
        at_once: bool,  # whether rows are written on the calling thread, unless a value has to be waited for
        has_all_writers: Callable[[], bool] | None = None,
    ) -> None:
        self._rows = rows
        self._limits = limits
        self._rank = rank
        self._at_once = at_once
        self._lifecycle = Lifecycle()
        self._waiting = OwnRows(rows, limits, rank, self._lifecycle, has_all_writers)
        self._writing_thread: int | None = None  # the user's thread that is writing a row
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._waiting.run, name="dist_wandb-own-rows", daemon=True)
        self._unstarted = deque([self._thread])  # the caller that pops it starts it

    def start(self) -> None:
        """Start the thread if it is certain to be needed."""
        if not self._at_once and self._rows.has_run:
            self._start_thread()

    def put(self, contribution: Contribution) -> None:
        """Write the contribution as one row, or hand it to the thread."""
        if not self._rows.has_run:
            return
        if self._is_free and contribution.has_arrived():
            self._write_directly(contribution)
        elif self._waiting.has_room():
            self._hand_over(contribution)

    @property
    def _is_free(self) -> bool:
        """Whether this thread may write: no earlier row waits, and it does not interrupt its own writing."""
        return self._at_once and self._waiting.is_empty and self._writing_thread != threading.get_ident()

    def _write_directly(self, contribution: Contribution) -> None:
        self._writing_thread = threading.get_ident()
        try:
            self._rows.posting.write_own(contribution)
        finally:
            self._writing_thread = None

    def _hand_over(self, item: Contribution | Flush) -> None:
        self._waiting.put(item)
        self._start_thread()

    def _start_thread(self) -> None:
        with suppress(IndexError):
            thread = self._unstarted.pop()
            self._waiting.begin()
            thread.start()
            remember(self)

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait until everything that was put is written; `together` has no effect."""
        if self._is_foreign() or self._lifecycle.ended.is_set() or not self._rows.has_run:
            return True
        if self._is_free:
            self._waiting.end_row()
            return True
        flush = Flush(together=together)
        self._hand_over(flush)
        limit = self._limits.flush_timeout if timeout is None else timeout
        return is_set_within(flush, limit, self._lifecycle.ended.is_set)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Flush, write all rows even if other writers are missing, and end the thread; see `Exchange.close`."""
        if self._is_foreign():
            return True
        self._lifecycle.has_failed = failed
        try:
            if not failed:
                self.flush(timeout)
        except KeyboardInterrupt as error:
            self._end(error)
        self._end()
        report_lost(self._rank, self._rows.lost)
        return self._thread in self._unstarted or not self._waiting.warn_of_lost(self.unwritten)

    def _end(self, interrupt: KeyboardInterrupt | None = None) -> None:
        self._ask(Demand.CLOSE)
        if self._thread in self._unstarted:
            self._waiting.end_row()
            if interrupt is not None:
                raise interrupt
            return
        try:
            write_rest(self._lifecycle, self._waiting.left, self._rank, LAST_WRITES, interrupt)
        finally:
            self._lifecycle.ask(Demand.STOP)

    def detach(self) -> None:
        """End without waiting."""
        self._ask(Demand.CLOSE)

    def leave(self, *, failed: bool = False) -> None:
        """End at process exit."""
        if self._is_foreign():
            return
        if not self._lifecycle.is_closing:
            self.close(min(self._limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        self._ask(Demand.STOP)
        if self._thread.ident is not None:
            self._thread.join(LAST_WRITES)

    def _ask(self, demand: Demand) -> None:
        self._lifecycle.ask(demand)
        self._waiting.wake()

    @property
    def lost(self) -> frozenset[int]:
        """Always empty: no other rank participates."""
        return frozenset()

    @property
    def unwritten(self) -> int:
        """How many rows `close` has given up."""
        return self._lifecycle.unwritten

    @property
    def has_ended(self) -> bool:
        """Whether no thread is running."""
        return not self._thread.is_alive()

    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid  # a fork does not have the thread
