"""The interface between a session and its exchange, and code that all exchanges share: flush requests, process exit.

An exchange brings a rank's contributions into the rows of a run. `CollectiveExchange` combines the numbers of several
ranks, `DirectExchange` writes the rows of one rank, `WatchingExchange` none unless the rank that writes is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from dist_wandb.exchange.lifecycle import Lifecycle
from dist_wandb.exchange.posting import Contribution
from dist_wandb.store.timed_caller import settle

_log = logging.getLogger("dist_wandb")

WITHOUT_FINISH = 10.0  # maximum seconds that an exiting process waits for others if its session was not finished
DEVICE_POLL_INTERVAL = 0.005  # seconds between two checks whether a device has computed the logged values
_SLICE = 0.2  # seconds between two checks whether to stop waiting
_QUIET = 5.0  # seconds until the first line about rows that are being written at the end; then it doubles
_LAST_ANSWERS = 3.0  # seconds at process exit for abandoned calls of the store to return


class Exchange(Protocol):
    """Takes the contributions of one rank, and has finished rows written in order."""

    def start(self) -> None:
        """Begin, once the session is complete."""

    def put(self, contribution: Contribution) -> None:
        """Add a contribution, without waiting for other ranks."""

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait until everything that was put is finished, and written if this rank writes it; return whether it is.

        The timeout is in seconds, by default `finish_timeout`. If all ranks flush at this point, `together`, the flush
        ends once all of them have reached it, and everything that any of them put is finished.
        """

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """Wait as `flush` does, write what is left, as long as W&B takes it, and end; nothing may be put afterwards.

        Returns whether everything that was put is written, or delivered to the rank that writes it. If the process has
        failed, waits for other ranks no longer than a heartbeat. The first Ctrl-C ends the waiting for other ranks, the
        second one the writing; then KeyboardInterrupt is raised.
        """

    def detach(self) -> None:
        """End without waiting: nothing more is put, and there is no run to write to."""

    def leave(self, *, failed: bool = False) -> None:
        """End at process exit, after a failure or not."""

    @property
    def lost(self) -> frozenset[int]:
        """Indices in the unit of ranks that opened a session, and are gone without having finished."""

    @property
    def unwritten(self) -> int:
        """How many rows that were put `close` has given up."""

    @property
    def has_ended(self) -> bool:
        """Whether its thread has ended."""


class Flush(threading.Event):
    """A pending flush request, of all ranks `together` or not; set when everything put before it is written."""

    def __init__(self, *, together: bool = False) -> None:
        super().__init__()
        self.together = together


def is_set_within(event: threading.Event, seconds: float, gives_up: Callable[[], bool]) -> bool:
    """Wait for an event, up to `seconds` or until `gives_up` returns true; return whether the event is set."""
    deadline = time.monotonic() + seconds
    while not event.wait(min(_SLICE, max(0.0, deadline - time.monotonic()))):
        if gives_up() or time.monotonic() >= deadline:
            return event.is_set()
    return True


def write_rest(
    lifecycle: Lifecycle,
    left: Callable[[], int],  # how many rows, approximately
    rank: int,  # in the job, for messages
    standstill: float,  # seconds without a written row after which the others are given up
    interrupt: KeyboardInterrupt | None = None,
) -> None:
    """Wait until an exchange's thread has written its last rows, as long as W&B takes them, and report the progress.

    Raises KeyboardInterrupt at the end if the user has interrupted it, or had before (`interrupt`). The second Ctrl-C,
    or the first one if the process has failed, gives up the rows that are left.
    """
    why = None
    while True:
        try:
            if interrupt is not None and left():
                _log.warning(
                    "dist_wandb: rank %d writes its last %d rows. Press Ctrl-C again to lose them.", rank, left()
                )
            if not _ends(lifecycle.ended, left, rank, standstill):
                why = f"W&B has taken none for {standstill:.3g} s"
            break
        except KeyboardInterrupt as error:
            if interrupt is not None or lifecycle.has_failed:
                interrupt, why = error, "writing them was interrupted"
                break
            interrupt = error
    if why is not None:
        _give_up(lifecycle, left(), rank, why)
    if interrupt is not None:
        raise interrupt


def _ends(ended: threading.Event, left: Callable[[], int], rank: int, standstill: float) -> bool:
    """Wait for a thread; return whether it ends before it stands still."""
    all_rows = rows = left()
    moved = told = time.monotonic()
    quiet = _QUIET
    while not ended.wait(min(_SLICE, standstill)):
        now, before, rows = time.monotonic(), rows, left()
        if rows < before:
            moved = now
        elif now - moved > standstill:
            return False
        if rows and now - told > quiet:
            told, quiet = now, 2 * quiet
            _log.warning("dist_wandb: rank %d writes its last rows: %d of %d are left.", rank, rows, all_rows)
    return True


def _give_up(lifecycle: Lifecycle, rows: int, rank: int, why: str) -> None:
    lifecycle.unwritten += rows
    if rows:
        _log.warning("dist_wandb: about %d rows of rank %d are lost: %s. The run ends as failed.", rows, rank, why)


_live: list[Exchange] = []


def remember(exchange: Exchange) -> None:
    """Register an exchange for `end_all`."""
    _live[:] = [known for known in _live if not known.has_ended]
    _live.append(exchange)


def end_all(*, failed: bool) -> None:
    """End all exchanges at process exit: those of finished sessions may still serve other ranks."""
    for exchange in reversed(_live):
        with suppress(KeyboardInterrupt):  # the others must end as well
            exchange.leave(failed=failed)
    settle(_LAST_ANSWERS)
