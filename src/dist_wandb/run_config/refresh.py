"""When the config is refreshed: once per heartbeat, or at once; never twice at the same time.

A refresh publishes what is new on this rank. It may also poll the other ranks, a request to the job's store. A
session's thread refreshes once per heartbeat, and polls when the exchange reports that some rank has published
something. Otherwise it polls, for messages from ranks of other units, when this rank has not polled for a pause that
doubles from a heartbeat up to `_SELDOM`. A read refreshes and polls once per heartbeat, or at once for a missing name.
`flush` and `finish` do so at once, for a second at most. `log` never does. If a unit has one rank, or with
``reduce=None``, there is no thread: then only reads, writes, `flush` and `finish` refresh.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.notices import Notices

if TYPE_CHECKING:
    from dist_wandb.run_config.messages import Connection

_log = logging.getLogger("dist_wandb")

_PATIENCE = 1.0  # seconds that a write waits for a refresh by another thread
_SELDOM = 10.0  # seconds between two polls, at most, unless the exchange reports something new


class Refresh:
    """Refreshes the config on this rank. Never waits for a rank, and raises nothing.

    `heartbeat` is in seconds, and longer than the exchange's if there are very many ranks. `update` publishes what is
    new here, and applies what other ranks have published. Its arguments are whether to check all values for changes,
    and whether to poll the other ranks.
    """

    def __init__(self, connection: Connection, heartbeat: float, update: Callable[[bool, bool], None]) -> None:
        self._connection = connection
        self._heartbeat = heartbeat
        self._update = update
        self._lock = threading.RLock()
        self._is_busy = False  # reads and writes of the config by this thread do not start another refresh
        self._polled = -math.inf  # when this rank polled last, by the monotonic clock
        self._next_refresh = -math.inf  # of the session's thread
        self.published: float = 0.0  # how often any rank had published something when the session's thread polled last
        self.pause: float = heartbeat  # seconds after a poll until that thread polls, unless something new is reported
        self._notices = Notices()

    def __call__(self, *, at_once: bool = False, whole: bool = False) -> None:
        """Refresh and poll, if it is time to: once per heartbeat, or `at_once`; `whole` as for `Publisher.publish`."""
        if at_once or time.monotonic() >= self._polled + self._heartbeat:
            self._refresh(_PATIENCE if at_once else 0.0, whole=whole, polls=True)

    def in_background(self, published: float) -> None:
        """Refresh, if it is time to, on a thread whose rounds other ranks wait for.

        `published` is how often any rank has published something, as far as the exchange reports it.
        """
        now, is_news = time.monotonic(), published != self.published
        if not is_news and now < self._next_refresh:
            return
        polls = is_news or now >= self._polled + self.pause
        if not self._refresh(0.0, whole=False, polls=polls):
            return
        self._next_refresh = now + self._heartbeat
        if polls:
            longer = min(2 * self.pause, max(self._heartbeat, _SELDOM))
            self.published, self.pause = published, self._heartbeat if is_news else longer

    def _refresh(self, patience: float, *, whole: bool, polls: bool) -> bool:
        """Refresh, unless another thread does so for longer than `patience` seconds. Return whether this one could."""
        if not self._connection.is_usable or not self._lock.acquire(timeout=patience):
            return False
        was_busy, self._is_busy = self._is_busy, True
        try:
            if not was_busy:
                if polls:
                    self._polled = time.monotonic()
                self._update(whole, polls)
        except RendezvousError as error:  # the store is gone, usually because the job has ended
            _log.debug("dist_wandb: rank %d can neither publish nor read its config: %s", self._connection.rank, error)
        except ConfigurationError as error:  # another rank's message cannot be read
            if self._notices.is_first("malformed"):
                _log.warning("dist_wandb: rank %d cannot follow the config: %s", self._connection.rank, error)
        except Exception:  # noqa: BLE001  # must not affect the training
            if self._notices.is_first("failed"):
                _log.exception("dist_wandb: rank %d could not bring its config up to date", self._connection.rank)
        finally:
            self._is_busy = was_busy
            self._lock.release()
        return True

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Refresh before and after the block, but not inside it, because what is written depends on what was read."""
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
