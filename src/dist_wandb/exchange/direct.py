"""Rows that are one rank's own, on their way into its run: nothing is brought together with other ranks.

So it is in a world of one, in a unit of one rank, with ``reduce=None``, and with ``run_mode="new"`` without a
reduction.

In a job of several ranks a thread of the session writes them, so that neither a device nor wandb's own process, should
one of them stop, holds up the training. In a world of one they are written on the calling thread, as with wandb alone
(`run.summary` has them at once), unless a device has yet to compute what is in them: then the thread writes them, and
what comes after them until it is done. In both cases in the order in which they were put.

In a shared run rows are kept until all writers are attached: a writer that attaches after rows were sent may make the
server lose some (wandb issue 12269). With a `CollectiveExchange` the first generation begins after that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dist_wandb.exchange.interface import WITHOUT_FINISH, Flush, is_set_within, remember
from dist_wandb.exchange.lifecycle import Demand, Lifecycle
from dist_wandb.exchange.own_rows import OwnRows
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.rows import Rows
from dist_wandb.settings.limits import Limits

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
        self._at_once = at_once
        self._lifecycle = Lifecycle()
        self._waiting = OwnRows(rows, limits, rank, self._lifecycle, has_all_writers)
        self._writing_here: int | None = None  # the thread of the user that writes a row
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._waiting.run, name="dist_wandb-own-rows", daemon=True)
        self._unstarted = deque([self._thread])  # whoever takes it starts it

    def start(self) -> None:
        """Start the thread, where it is sure to be needed."""
        if not self._at_once and self._rows.has_run:
            self._start_thread()

    def put(self, contribution: Contribution) -> None:
        """Write the contribution as one row, or hand it to the thread."""
        if not self._rows.has_run:
            return
        is_free = self._at_once and self._waiting.is_empty and self._writing_here != threading.get_ident()
        if self._lifecycle.is_closing or (is_free and contribution.has_arrived()):
            self._write_here(contribution)
        elif self._waiting.has_room():
            self._hand_over(contribution)

    def _write_here(self, contribution: Contribution) -> None:
        self._writing_here = threading.get_ident()
        try:
            self._rows.posting.write_own(contribution)
        finally:
            self._writing_here = None

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
        """Wait until all that was put is written.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            together: Makes no difference: nothing is brought together.

        Returns:
            Whether it is.
        """
        if self._is_foreign() or self._waiting.is_empty or self._lifecycle.ended.is_set():
            return True
        flush = Flush(together=together)
        self._hand_over(flush)
        limit = self._limits.flush_timeout if timeout is None else timeout
        return is_set_within(flush, limit, self._lifecycle.ended.is_set)

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
        self._ask(Demand.CLOSE)
        if self._thread in self._unstarted:
            return True
        if not self._lifecycle.ended.wait(_LAST_WORDS):
            self._lifecycle.ask(Demand.STOP)
        return not self._waiting.warn_of_lost()

    def detach(self) -> None:
        """Say that nothing more comes, without waiting."""
        self._ask(Demand.CLOSE)

    def leave(self, *, failed: bool = False) -> None:
        """End with this process."""
        if self._is_foreign():
            return
        if not self._lifecycle.is_closing:
            self.close(min(self._limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        self._ask(Demand.STOP)
        if self._thread.ident is not None:
            self._thread.join(_LAST_WORDS)

    def _ask(self, demand: Demand) -> None:
        self._lifecycle.ask(demand)
        self._waiting.wake()

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
