"""The interface between a session and its exchange, and what all exchanges share: life cycle, flushes, process exit.

An exchange brings a rank's contributions into the rows of a run. `CollectiveExchange` combines the numbers of several
ranks, `DirectExchange` writes the rows of one rank, `WatchingExchange` none unless the rank that writes is missing.

The user's threads ask it to close (`close`, `detach`: nothing more is put), then perhaps to stop (a timeout, or process
exit: no other rank is waited for). The exchange's thread alone advances its phase::

    phase    TOGETHER ──all closed, or stopped──▶ LEAVING
                 ├──another rank becomes the primary──▶ MOVING ──▶ LEAVING
                 └──the others or the store cannot be reached──▶ ALONE, or BROKEN if that fails too

`delivered` is set once the thread was asked to close and the others have received everything that this rank logged;
`ended` is set when it writes nothing more. A thread in phase BROKEN accepts nothing, and its remaining rows are lost.

A rank that has failed closes too, but tells the others only that it pauses: they take what it has logged, and a row
that it will never complete waits until the rank has left as failed, and is marked.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

from dist_wandb.exchange.rows import Contribution
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.timed_caller import settle
from dist_wandb.settings.options import Limits

_log = logging.getLogger("dist_wandb")

LAST_WRITES = 5.0  # seconds without a written row after which the remaining ones are given up, at the end
WITHOUT_FINISH = 10.0  # maximum seconds that an exiting process waits for others if its session was not finished
DEVICE_POLL_INTERVAL = 0.005  # seconds between two checks whether a device has computed the logged values
_LAST_ROUNDS = 0.5  # seconds that a failed rank gets, after a heartbeat, to hand over what it has logged
_LONGEST_GRACE = 3.0  # seconds, for any heartbeat
_SLICE = 0.2  # seconds between two checks whether to stop waiting
_QUIET = 5.0  # seconds until the first line about rows that are being written at the end; then it doubles
_LAST_ANSWERS = 3.0  # seconds at process exit for abandoned calls of the store to return

live: list[Exchange] = []  # those whose threads may run


class Phase(Enum):
    """The phase of the exchange's thread."""

    TOGETHER = auto()  # it takes part in rounds, or waits to
    MOVING = auto()  # it opens another exchange, which takes the rows
    ALONE = auto()  # it writes this rank's rows without the others
    LEAVING = auto()  # it announces that it leaves
    BROKEN = auto()


@dataclass(frozen=True)
class Hooks:
    """The session's functions that the thread calls."""

    find: Callable[[], JobStore | None] = lambda: None  # finds the job's store; called until it returns one
    between_rounds: Callable[[float], None] = lambda _: None  # called with the publications of all ranks
    is_over: Callable[[], bool] = lambda: False  # whether the coordinator has ended this session already
    # whether the primary may still come, as it opens its run or one around it; there: others, which end a former one
    is_opening: Callable[[], bool] = lambda: False
    failure: Callable[[], str | None] = lambda: None  # why it could not open it, if it could not
    move: Callable[[int], None] | None = None  # continues in another exchange, given the rank of its primary
    publications: Callable[[], int] = lambda: 0  # number of publications of this rank through the job's store
    names_unopened: bool = True  # whether to report ranks that have opened no session


class Lifecycle:
    """The state that the user's threads share with the thread of an exchange."""

    def __init__(self) -> None:
        self.is_closing = False  # nothing more is put
        self.is_stopped = False  # no other rank is waited for; then it is closing, too
        self.phase: Phase = Phase.TOGETHER
        self.delivered: threading.Event = threading.Event()
        self.ended: threading.Event = threading.Event()
        self.has_failed = False  # the process has failed, or the user has interrupted the end
        # Indices in the unit of ranks that opened a session, and are gone without having finished; those of them with
        # which this one never exchanged anything.
        self.lost: frozenset[int] = frozenset()
        self.unmet: frozenset[int] = frozenset()
        self.is_needed = False  # others will request states, tables or spreads of what was delivered
        self.may_have_lost = False  # rows may be lost, because the rank that writes them cannot be reached
        self.unwritten = 0  # rows that were put, and that `close` has given up
        self.successor: Exchange | None = None  # continues in place of this exchange, with another primary

    @property
    def has_kept_all(self) -> bool:
        """Whether no row is known to be lost."""
        return not (self.phase is Phase.BROKEN or self.may_have_lost or self.unwritten)

    def end(self) -> None:
        self.delivered.set()
        self.ended.set()


class Flush(threading.Event):
    """A pending flush request, of all ranks `together` or not; set when everything put before it is written.

    It ends the open row (`commit`), or leaves it open.
    """

    def __init__(self, *, together: bool = False, commit: bool = True) -> None:
        super().__init__()
        self.together, self.commit = together, commit


class Exchange(ABC):
    """Takes the contributions of one rank, and has finished rows written in order, on a thread of its own."""

    def __init__(self, limits: Limits, rank: int, name: str) -> None:
        self._limits = limits
        self._rank = rank  # in the job, for messages
        self.lifecycle = Lifecycle()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"dist_wandb-{name}", daemon=True)

    def start(self) -> None:
        """Begin, once the session is complete."""
        self._thread.start()
        live[:] = [known for known in live if not known.has_ended]
        live.append(self)

    @abstractmethod
    def put(self, contribution: Contribution) -> None:
        """Add a contribution, without waiting for other ranks."""

    def flush(self, timeout: float | None = None, *, together: bool = False, commit: bool = True) -> bool:
        """Wait until everything that was put is finished, and written if this rank writes it; return whether it is.

        The timeout is in seconds, by default `finish_timeout`. If all ranks flush here (`together`), the flush ends
        once everything that any of them put is finished. The open row ends (`commit`), or stays open.
        """
        lifecycle, flush = self.lifecycle, Flush(together=together, commit=commit)
        if self._is_foreign or lifecycle.ended.is_set():
            flush.set()
        else:
            self._wake(flush)
        deadline = time.monotonic() + self._waiting_time(timeout)
        while not flush.wait(min(_SLICE, max(0.0, deadline - time.monotonic()))):
            if lifecycle.ended.is_set() or time.monotonic() >= deadline:
                break
        if lifecycle.successor is not None:
            return lifecycle.successor.flush(timeout, together=together, commit=commit)
        return flush.is_set() and lifecycle.has_kept_all

    @abstractmethod
    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait as `flush` does, write what is left, as long as W&B takes it, and end; nothing may be put afterwards.

        Returns whether everything that was put is written, or delivered to the rank that writes it. If the process has
        failed, waits for other ranks no longer than a heartbeat, once all have met. The first Ctrl-C ends the waiting,
        the second one the writing; then KeyboardInterrupt is raised.
        """

    def pass_on(self, successor: Exchange) -> None:
        """Give what waits, on this exchange's thread, to the one with which the session continues; repeatable."""
        self.lifecycle.successor = successor

    def detach(self) -> None:
        """End without waiting: nothing more is put, and there is no run to write to."""
        if not self._is_foreign:
            self._ask()

    def leave(self, *, failed: bool = False) -> None:
        """End at process exit: a thread in native code at interpreter shutdown would abort the process."""
        if self._is_foreign:
            return
        within = min(self._limits.flush_timeout, WITHOUT_FINISH)
        if not self.lifecycle.is_closing:
            self.close(within, failed=failed)
        self._stop_at_exit(within, failed=failed)
        if self._thread.is_alive():
            self._thread.join(LAST_WRITES)

    def _stop_at_exit(self, within: float, *, failed: bool) -> None:  # noqa: ARG002  # of exchanges with other ranks
        self._ask(stop=True)

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    @property
    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid  # a fork does not have the thread

    def _waiting_time(self, timeout: float | None, *, failed: bool = False) -> float:
        """Return how long a flush or an end waits, in seconds; for other ranks, no longer than a grace if it failed."""
        limits = self._limits
        time_limit = limits.flush_timeout if timeout is None else timeout
        return min(time_limit, limits.heartbeat + _LAST_ROUNDS, _LONGEST_GRACE) if failed else time_limit

    def _ask(self, *, stop: bool = False) -> None:
        self.lifecycle.is_closing = True
        if stop:
            self.lifecycle.is_stopped = True
        self._wake()

    @abstractmethod
    def _wake(self, flush: Flush | None = None) -> None:
        """Wake the thread, which is to close, or to set a flush once everything put before it is written."""

    @abstractmethod
    def _left(self) -> int:
        """Return approximately how many rows the thread has yet to write."""

    @abstractmethod
    def _run(self) -> None:
        """The work of the thread."""

    def _write_rest(self, interrupt: BaseException | None = None) -> bool:
        """Wait until the thread has written its last rows, as long as W&B takes them; return whether it has.

        Reports the progress. While the thread opens a run, W&B limits the time. Raises KeyboardInterrupt at the end if
        the user has interrupted it, or what had interrupted the end before. The second Ctrl-C, or the first one if the
        process has failed, gives up the rows that are left.
        """
        lifecycle, rows = self.lifecycle, self._left()
        all_rows, why, quiet, is_told = rows, None, _QUIET, not isinstance(interrupt, KeyboardInterrupt)
        moved = told = time.monotonic()
        while why is None:
            try:
                if rows and not is_told:
                    _log.warning(
                        "dist_wandb: rank %d writes its last %d rows. Press Ctrl-C again to lose them.",
                        *(self._rank, rows),
                    )
                is_told = True
                if lifecycle.ended.wait(min(_SLICE, LAST_WRITES)):
                    break
                now, before, rows = time.monotonic(), rows, self._left()
                if rows < before or lifecycle.phase is Phase.MOVING:
                    moved = now
                if now - moved > LAST_WRITES:
                    why = f"W&B has taken none for {LAST_WRITES:.3g} s"
                elif rows and now - told > quiet:
                    told, quiet = now, 2 * quiet
                    _log.warning(
                        "dist_wandb: rank %d writes its last rows: %d of %d are left.", self._rank, rows, all_rows
                    )
            except KeyboardInterrupt as error:
                if interrupt is not None or lifecycle.has_failed:
                    interrupt, why = error, "writing them was interrupted"
                else:
                    interrupt, is_told, moved = error, False, time.monotonic()
        rows = 0 if why is None else self._left()
        for _ in range(2 if rows else 0):  # a round that is unpacked has some rows in two lists for a moment
            time.sleep(_SLICE)
            rows = min(rows, self._left())
        if rows:
            lifecycle.unwritten += rows
            _log.warning(
                "dist_wandb: about %d rows of rank %d are lost: %s. The run ends as failed.", rows, self._rank, why
            )
        if interrupt is not None:
            raise interrupt
        return why is None


def end_all(*, failed: bool) -> None:
    """End all exchanges at process exit: those of finished sessions may still serve other ranks."""
    for exchange in reversed(live):
        with suppress(KeyboardInterrupt):  # the others must end as well
            exchange.leave(failed=failed)
    settle(_LAST_ANSWERS)
