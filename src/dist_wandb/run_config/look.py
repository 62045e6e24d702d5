"""When the config is brought up to date: once in a heartbeat, or at once; never twice at the same time.

A session's thread looks once in a heartbeat at what is new here. What is new elsewhere costs a request to the job's
store, so it looks at that when the exchange brings word that some rank has published something; otherwise after pauses
that double from a heartbeat up to `_SELDOM`, for what comes from a rank of another unit. A reader looks once in a
heartbeat, but for names that are not there at once. `flush` and `finish` look, for a second at most. `log` never does.
Where a unit has one rank, or with ``reduce=None``, there is no thread: then reads, writes, `flush` and `finish` look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_wandb.errors import RendezvousError
from dist_wandb.notices import Notices

if TYPE_CHECKING:
    from dist_wandb.run_config.connection import Connection

_log = logging.getLogger("dist_wandb")

_PATIENCE = 1.0  # seconds that a write waits for a look that another thread is making
_SELDOM = 10.0  # seconds between two looks at what is new elsewhere, at most, where nobody brings word of it


class Background:
    """When a session's thread looks. Pure: the time is an argument, in seconds.

    Args:
        heartbeat: How often to look at what is new here, and how often elsewhere at first, in seconds.

    Attributes:
        heard: How often any rank had published something when it looked elsewhere last.
        next_elsewhere: When to look there again, if nobody brings word of something new.
    """

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self.heard: float = 0.0
        self.next_elsewhere: float = 0.0
        self._next_here = 0.0
        self._pause = heartbeat  # before looking elsewhere

    def is_due(self, now: float, heard: float) -> bool:
        """Whether to look at what is new here."""
        return heard != self.heard or now >= self._next_here

    def is_due_elsewhere(self, now: float, heard: float) -> bool:
        """Whether to look at what is new elsewhere as well."""
        return heard != self.heard or now >= self.next_elsewhere

    def looked(self, now: float, heard: float, *, elsewhere: bool) -> None:
        """Note that it has looked."""
        self._next_here = now + self._heartbeat
        if elsewhere:
            longer = min(2 * self._pause, max(self._heartbeat, _SELDOM))
            self.heard, self._pause = heard, self._heartbeat if heard != self.heard else longer
            self.next_elsewhere = now + self._pause


class Look:
    """Brings the config up to date on this rank. Never waits for a rank, and raises nothing.

    Args:
        connection: To the other ranks.
        heartbeat: How often to look, in seconds: more than the exchange's where there are very many ranks.
        update: Publishes what is new here, and applies what is new elsewhere; its arguments are whether to look into
            all values, and whether to look elsewhere.
    """

    def __init__(self, connection: Connection, heartbeat: float, update: Callable[[bool, bool], None]) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._update = update
        self._lock = threading.RLock()
        self._is_busy = False  # reads and writes of the config by this thread do not start another look
        self._next = 0.0
        self._background = Background(heartbeat)
        self._notices = Notices()

    def __call__(self, *, at_once: bool = False, whole: bool = False) -> None:
        """Look, if it is time to.

        Args:
            at_once: Whether to do so now. Otherwise it is done once in a heartbeat.
            whole: Whether to look into all values. Otherwise into those that were written, and into a few of those
                that may have changed inside.
        """
        if at_once or time.monotonic() >= self._next:
            self._look(_PATIENCE if at_once else 0.0, whole=whole, elsewhere=True)

    def in_background(self, heard: float) -> None:
        """Look, if it is time to, on a thread whose rounds others wait for.

        Args:
            heard: How often any rank has published something, as the exchange brings word of it.
        """
        now = time.monotonic()
        if not self._background.is_due(now, heard):
            return
        elsewhere = self._background.is_due_elsewhere(now, heard)
        if self._look(0.0, whole=False, elsewhere=elsewhere):
            self._background.looked(now, heard, elsewhere=elsewhere)

    def _look(self, patience: float, *, whole: bool, elsewhere: bool) -> bool:
        """Look, unless another thread does so for longer than `patience` seconds; whether this one could."""
        if not self._connection.is_usable or not self._lock.acquire(timeout=patience):
            return False
        was_busy, self._is_busy = self._is_busy, True
        try:
            if not was_busy:
                if elsewhere:
                    self._next = time.monotonic() + self._heartbeat
                self._update(whole, elsewhere)
        except RendezvousError as error:  # the store is gone, and mostly the job with it
            _log.debug("dist_wandb: rank %d can neither publish nor read its config: %s", self._connection.rank, error)
        except Exception:  # noqa: BLE001  # the training must not suffer
            if self._notices.is_first("failed"):
                _log.exception("dist_wandb: rank %d could not bring its config up to date", self._connection.rank)
        finally:
            self._is_busy = was_busy
            self._lock.release()
        return True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Look now and after the block, but not inside it, because what is written depends on what was read."""
        self(at_once=True)
        if self._lock.acquire(timeout=_PATIENCE):
            was_busy, self._is_busy = self._is_busy, True
            try:
                yield
            finally:
                self._is_busy = was_busy
                self._lock.release()
            self(at_once=True)
        else:  # another thread waits for a stalled store
            yield
