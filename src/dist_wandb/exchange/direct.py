"""Rows that are one rank's own, on their way into its run: nothing is brought together with other ranks.

In a job of several ranks a thread of the session writes them, so that neither a device nor wandb's own process, should
one of them stop, holds up the training. In a world of one they are written on the calling thread, as with wandb alone
(`run.summary` tells at once), unless a device has yet to compute what is in them: then the thread writes them, and what
comes after them until it is done. In both cases in the order in which they were put.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from dist_wandb.exchange.interface import LOOK_AT_DEVICES, WITHOUT_FINISH, Flush, is_set_within, remember
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.notices import Notices
from dist_wandb.settings.limits import Limits

_LOOK_AGAIN = 0.1  # seconds between two looks whether all writers are there
_STANDSTILL = 1.0  # seconds after which a row that is being written is not waited for
_LAST_WORDS = 2.0  # seconds that the thread is given to write what is there, when its time is over


class DirectExchange:
    """The exchange of a rank whose rows are its own.

    Nothing in `put` takes a lock that a signal handler would wait for which interrupts it and logs.

    Args:
        rows: Makes rows of contributions.
        limits: `finish_timeout` says how long `flush` and `close` wait; `max_pending_rows` how many rows may wait for
            wandb's own process; `join_timeout` how long other writers are waited for.
        rank: This rank's index in the job, for messages.
        at_once: Whether rows are written on the calling thread, as long as nothing in them has to be waited for.
        has_all_writers: Asked on the thread, now and then, before anything is written: whether the other writers of a
            shared run are there. One that attaches after rows were sent may make the server lose rows (wandb issue
            12269). `None` where there are none to wait for.
    """

    def __init__(
        self,
        rows: Rows,
        limits: Limits,
        rank: int,
        *,
        at_once: bool,
        has_all_writers: Callable[[], bool] | None = None,
    ) -> None:
        self._rows = rows
        self._limits = limits
        self._rank = rank
        self._at_once = at_once
        self._has_all_writers = has_all_writers
        self._waiting: deque[Contribution | Flush] = deque()  # each until it is written
        self._wake: SimpleQueue[None] = SimpleQueue()  # its `put` may be interrupted by itself
        self._writing_here: int | None = None  # the thread of the user that writes a row
        self._written_at = 0.0  # when the thread began, or ended, to write a row last
        self._lost = 0
        self._notices = Notices()
        self._closing = False
        self._write_all = threading.Event()  # no waiting for other writers any more
        self._stopped = threading.Event()  # nor for anything else
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name="dist_wandb-own-rows", daemon=True)
        self._unstarted = deque([self._thread])  # whoever takes it starts it

    # On the threads of the user

    def start(self) -> None:
        """Start the thread, where it is sure to be needed."""
        if not self._at_once and self._rows.has_run:
            self._start_thread()

    def put(self, contribution: Contribution) -> None:
        """Write the contribution as one row, or hand it to the thread."""
        if not self._rows.has_run:
            return
        is_free = self._at_once and not self._waiting and self._writing_here != threading.get_ident()
        if self._closing or (is_free and contribution.has_arrived()):
            self._write_here(contribution)
        elif len(self._waiting) < self._limits.max_pending_rows or self._gets_room():
            self._hand_over(contribution)
        else:
            self._lost += 1

    def _write_here(self, contribution: Contribution) -> None:
        self._writing_here = threading.get_ident()
        try:
            self._rows.write_own(contribution)
        finally:
            self._writing_here = None

    def _hand_over(self, item: Contribution | Flush) -> None:
        self._waiting.append(item)
        self._start_thread()
        self._wake.put(None)

    def _start_thread(self) -> None:
        with suppress(IndexError):
            thread = self._unstarted.pop()
            self._written_at = time.monotonic()
            thread.start()
            remember(self)

    def _gets_room(self) -> bool:
        """Wait as long as rows are being written, as with wandb alone; whether there is room for another one."""
        while len(self._waiting) >= self._limits.max_pending_rows:
            if time.monotonic() - self._written_at > _STANDSTILL and self._has_all_writers is None:
                self._notices.warn(
                    "full",
                    f"more than {self._limits.max_pending_rows} rows of rank {self._rank} wait for wandb's own "
                    "process, or a device, which stands still. Further ones are lost until it goes on. See "
                    "max_pending_rows.",
                )
                return False
            time.sleep(LOOK_AT_DEVICES)
        return True

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:  # noqa: ARG002  # the protocol's
        """Wait until all that was put is written.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            together: Makes no difference: nothing is brought together.

        Returns:
            Whether it is.
        """
        if self._is_foreign() or not self._waiting or self._ended.is_set():
            return True
        flushed = Flush()
        self._hand_over(flushed)
        return is_set_within(flushed, self._limits.flush_timeout if timeout is None else timeout, self._ended.is_set)

    def close(self, timeout: float | None = None, *, failed: bool = False) -> bool:
        """As `flush`; then all is written, whichever other writers are there, and the thread ends.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            failed: Whether to wait for no other rank, nor long for anything else.

        Returns:
            Whether all that was put is written.
        """
        if self._is_foreign():
            return True
        if not failed:
            self.flush(timeout)
        self._closing = True
        self._write_all.set()
        if self._thread in self._unstarted:
            return True
        self._wake.put(None)
        if not self._ended.wait(_LAST_WORDS):
            self._stopped.set()
        unwritten = self._lost + sum(isinstance(item, Contribution) for item in self._waiting.copy())
        if unwritten:
            self._notices.warn(
                "unwritten",
                f"{unwritten} rows of rank {self._rank} are lost: wandb's own process did not take them in time, or a "
                "device has not computed what is in them.",
            )
        return not unwritten

    def retire(self) -> None:
        """Say that nothing more comes, without waiting."""
        self._closing = True
        self._write_all.set()
        self._wake.put(None)

    def leave(self, *, failed: bool = False) -> None:
        """Make an end: this process is about to."""
        if self._is_foreign():
            return
        if not self._closing:
            self.close(min(self._limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        self._stopped.set()
        self._wake.put(None)
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS)

    @property
    def lost(self) -> frozenset[int]:
        """Nobody else takes part."""
        return frozenset()

    @property
    def has_ended(self) -> bool:
        """Whether no thread is at work."""
        return not self._thread.is_alive()

    def _is_foreign(self) -> bool:
        """Whether this process is a fork, in which the thread does not exist."""
        return os.getpid() != self._pid

    # On the thread

    def _main(self) -> None:
        try:
            self._await_writers()
            while not (self._closing and not self._waiting) and not self._stopped.is_set():
                with suppress(Empty):
                    self._wake.get(timeout=None if not self._closing else 0)
                self._write_waiting()
        finally:
            self._ended.set()

    def _await_writers(self) -> None:
        until, most = time.monotonic() + self._limits.join_timeout, self._limits.max_pending_rows
        has_all_writers = self._has_all_writers
        while has_all_writers is not None and time.monotonic() < until and len(self._waiting) < most:
            if has_all_writers() or self._write_all.wait(_LOOK_AGAIN):
                break
        self._has_all_writers = None

    def _write_waiting(self) -> None:
        while self._waiting and not self._stopped.is_set():
            self._written_at = time.monotonic()
            item = self._waiting[0]
            if isinstance(item, Flush):
                self._waiting.popleft()
                item.set()
            elif self._has_arrived(item):
                self._write(item)
                self._written_at = time.monotonic()
                self._waiting.popleft()  # only now, so that no row that comes later is written before it

    def _has_arrived(self, contribution: Contribution) -> bool:
        """Wait for the devices; whether all of it is there, or never will be."""
        with suppress(Exception):  # of a device; it shows when the row is written
            while not contribution.has_arrived():
                if self._stopped.wait(LOOK_AT_DEVICES):
                    return False
        return True

    def _write(self, contribution: Contribution) -> None:
        try:
            self._rows.write_own(contribution)
        except Exception as error:  # noqa: BLE001  # one row must not end the others
            self._lost += 1
            message = f"a row of rank {self._rank} could not be written, and is lost: {error!r}"
            self._notices.warn(type(error).__name__, f"{message}. More errors of this kind are not told.")
