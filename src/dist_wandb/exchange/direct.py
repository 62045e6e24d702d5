"""Exchanges of a rank whose rows are not combined with those of others: it writes its own rows, or none.

`DirectExchange` is used in a world of one, in a unit of one rank, with ``reduce=None``, and with ``run_mode="new"``
without a reduction. As in wandb, a row to which a step was given stays open for more values of this step, until a row
of another step, or `flush`, or the end.

In a job of several ranks, a thread of the session writes the rows, so that neither a stalled device nor a stalled wandb
process delays the training. In a world of one, they are written on the calling thread, as with wandb alone
(`run.summary` has them at once, unless they stay open). If a device has yet to compute their values, the thread writes
these rows, and those that follow until it is done. In both cases, rows are written in the order in which they were put.

In a shared run, rows are kept until all ranks that have opened a session are attached: a writer that attaches after
rows were sent may make the server lose some (wandb issue 12269). With a `CollectiveExchange`, the first generation
begins after that.

`WatchingExchange` is used where only the primary's rows are written, on the other ranks. Their rows are kept until it
is certain that the primary has opened a session. If it has not, they are passed on to the session in which this one
continues, and another rank's rows are written.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL, Exchange, Flush, Hooks, Phase
from dist_wandb.exchange.membership import Membership
from dist_wandb.exchange.membership.forming import Moved, Over, Stopped
from dist_wandb.exchange.membership.generations import keys_of
from dist_wandb.exchange.reports import report_lost
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.notices import Notices
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit

_log = logging.getLogger("dist_wandb")
_POLL_INTERVAL = 0.1  # seconds between two checks whether all writers are attached
_END_OF_ROW = Contribution({}, None, writes_before=sys.maxsize)
_STANDSTILL = 1.0  # seconds after which a row that is being written is no longer waited for


class DirectExchange(Exchange):
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
        super().__init__(limits, rank, "own-rows")
        self._rows = rows
        self._at_once = at_once
        self._has_all_writers = has_all_writers
        self._notices = Notices()
        self._waiting: deque[Contribution | Flush] = deque()  # each until it is written
        self._awake: SimpleQueue[None] = SimpleQueue()  # its `put` is reentrant
        self._written_at = time.monotonic()  # when the thread last began or ended to write a row
        self._writing_thread: int | None = None  # the user's thread that is writing a row
        self._dropped = 0
        self._unstarted = deque([self._thread])  # the caller that pops it starts it

    # On the user's threads

    def start(self) -> None:
        """Start the thread if it is certain to be needed."""
        if not self._at_once and self._rows.writer.has_run:
            self._start_thread()

    def put(self, contribution: Contribution) -> None:
        if not self._rows.writer.has_run:
            return
        if self._is_free and contribution.has_arrived():
            self._writing_thread = threading.get_ident()
            try:
                self._rows.write_own(contribution)
            finally:
                self._writing_thread = None
            return
        most = self._limits.max_pending_rows
        while len(self._waiting) >= most:  # while rows are being written, it blocks as wandb does
            if time.monotonic() - self._written_at > _STANDSTILL and self._has_all_writers is None:
                self._notices.warn(
                    "full",
                    f"more than {most} rows of rank {self._rank} wait for wandb's own process, or a device, which "
                    "has stalled. Further rows are lost until it continues. See max_pending_rows.",
                )
                self._dropped += 1
                self.lifecycle.unwritten += 1
                return
            time.sleep(DEVICE_POLL_INTERVAL)
        self._hand_over(contribution)

    @property
    def _is_free(self) -> bool:
        """Whether this thread may write: no earlier row waits, and it does not interrupt its own writing."""
        return self._at_once and not self._waiting and self._writing_thread != threading.get_ident()

    def _hand_over(self, item: Contribution | Flush) -> None:
        self._waiting.append(item)
        self._awake.put(None)
        self._start_thread()

    def _start_thread(self) -> None:
        with suppress(IndexError):
            self._unstarted.pop()
            self._written_at = time.monotonic()
            super().start()

    def _wake(self, flush: Flush | None = None) -> None:
        if flush is None:
            self._awake.put(None)
        elif self._is_free or not self._rows.writer.has_run:
            self._answer(flush)
        else:
            self._hand_over(flush)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Flush, write all rows even if other writers are missing, and end the thread; see `Exchange.close`."""
        if self._is_foreign:
            return True
        lifecycle, interrupt = self.lifecycle, None
        lifecycle.has_failed = failed
        try:
            if not failed:
                self.flush(timeout)
        except BaseException as error:  # noqa: BLE001  # Ctrl-C, or of a signal handler: raised again at the end
            interrupt = error
        self._ask()
        if self._thread in self._unstarted:
            self._write(_END_OF_ROW)
            lifecycle.end()
        try:
            self._write_rest(interrupt)
        finally:
            lifecycle.is_stopped = True
        report_lost(self._rank, self._rows.writer.lost)
        if self._dropped:
            self._notices.warn(
                "unwritten",
                f"{self._dropped} rows of rank {self._rank} are lost: wandb's own process did not accept them in time, "
                "or a device has not computed their values. The run ends as failed.",
            )
        return not (lifecycle.unwritten or any(self._rows.writer.lost.values()))

    def _left(self) -> int:
        return sum(isinstance(item, Contribution) for item in self._waiting.copy())

    # On the thread

    def _run(self) -> None:
        lifecycle, has_all_writers = self.lifecycle, self._has_all_writers
        until, most = time.monotonic() + self._limits.join_timeout, self._limits.max_pending_rows
        try:
            while has_all_writers is not None and time.monotonic() < until and len(self._waiting) < most:
                if has_all_writers() or lifecycle.is_closing:
                    break
                time.sleep(_POLL_INTERVAL)
            self._has_all_writers = None
            while not (lifecycle.is_closing and not self._waiting) and not lifecycle.is_stopped:
                with suppress(Empty):
                    self._awake.get(timeout=0 if lifecycle.is_closing else None)
                while self._waiting and not lifecycle.is_stopped:
                    self._written_at = time.monotonic()
                    item = self._waiting[0]
                    if isinstance(item, Flush):
                        self._answer(item)
                        self._waiting.popleft()
                        continue
                    while not (is_copied := item.is_copied()) and not lifecycle.is_stopped:  # waits for the devices
                        time.sleep(DEVICE_POLL_INTERVAL)
                    if is_copied:
                        self._write(item)
                        self._written_at = time.monotonic()
                        self._waiting.popleft()  # only now, so that no later row is written before it
            if not lifecycle.is_stopped:
                self._write(_END_OF_ROW)
        finally:
            lifecycle.end()

    def _answer(self, flush: Flush) -> None:
        if flush.commit:
            self._write(_END_OF_ROW)
        flush.set()

    def _write(self, contribution: Contribution) -> None:
        """Write a row, or end the one that is left open. Never raises."""
        try:
            self._rows.write_own(contribution)
        except Exception as error:  # noqa: BLE001  # one row must not end the others
            self._rows.writer.lost["that W&B refused"] += len(contribution.metrics)
            message = f"a row of rank {self._rank} could not be written, and is lost: {error!r}"
            self._notices.warn(type(error).__name__, f"{message}. More errors of this kind are not reported.")


class WatchingExchange(Exchange):
    """The exchange of a rank that writes nothing, unless the primary is missing."""

    def __init__(self, unit: Unit, hooks: Hooks, limits: Limits) -> None:
        super().__init__(limits, unit.global_rank, "watching")
        self._unit = unit
        self._hooks = hooks
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

    def _wake(self, flush: Flush | None = None) -> None:
        if flush is not None:  # nothing is written here
            flush.set()

    def _left(self) -> int:
        return 0

    def pass_on(self, successor: Exchange) -> None:
        super().pass_on(successor)
        while self._kept:
            successor.put(self._kept.popleft())
        if self._writes and self._dropped:
            message = "dist_wandb: %d rows of rank %d are lost: see max_pending_rows. The run ends as failed."
            _log.warning(message, self._dropped, self._rank)
            successor.lifecycle.unwritten += self._dropped
            self._dropped = 0

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait until it is certain which rank writes the run; no longer than a heartbeat if the process has failed."""
        if self._is_foreign:
            return True
        lifecycle = self.lifecycle
        lifecycle.has_failed = failed
        self._ask()
        lifecycle.ended.wait(self._waiting_time(timeout, failed=failed))
        self._ask(stop=True)
        has_ended = self._write_rest()
        if self._has_rows and lifecycle.successor is None and (failure := self._hooks.failure()):
            _log.warning(
                "dist_wandb: init failed on rank %d, which has the run to which rank %d logs: %s",
                *(self._unit.global_rank_of(0), self._rank, failure),
            )
        return has_ended and lifecycle.has_kept_all

    def _is_stopped(self) -> bool:
        return (self.lifecycle.is_closing and not self._kept) or self.lifecycle.is_stopped

    def _run(self) -> None:
        lifecycle = self.lifecycle
        try:
            hooks, store, unit, primary = self._hooks, self._hooks.find(), self._unit, None
            has_rows = lambda: bool(self._kept) and not lifecycle.has_failed  # noqa: E731
            is_due = lambda: lifecycle.is_closing  # noqa: E731
            try:  # waits until it is certain which rank of the unit writes its run
                if store is not None:
                    membership = Membership(unit, self._limits, store.beside(keys_of(unit)), self._is_stopped)
                    membership.arrive(self._limits.join_timeout, hooks, is_due, has_rows, watches=True)
            except Moved as moved:
                primary = moved.primary
            except Over:
                primary = 0  # it has written the run, or could not open it: see `close`
            except (Stopped, RendezvousError):
                pass
            if primary is None and self._kept:
                lifecycle.may_have_lost = True
                message = (
                    "dist_wandb: what rank %d logged may be lost: it ended before it was certain which rank writes the "
                    "run. Pass primary_rank to init if rank %d does not call it."
                )
                _log.warning(message, self._rank, self._unit.global_rank_of(0))
            if primary and self._hooks.move is not None:
                lifecycle.phase, self._writes = Phase.MOVING, primary == self._unit.index
                self._hooks.move(self._unit.global_rank_of(primary))
        except Exception:  # noqa: BLE001  # the training must continue
            lifecycle.phase = Phase.BROKEN
            _log.exception("dist_wandb: rank %d cannot open the run, which no rank writes", self._rank)
        finally:
            self._kept = None
            lifecycle.end()
