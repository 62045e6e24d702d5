"""The queue from the user's threads to the thread of the exchange: contributions, in their order, and flush requests.

A contribution is ready when the event that was recorded on its device is. Those behind one that is not ready wait too,
so that rows keep their order.

Neither this queue nor the outbox loses a row. A script that logs faster than the ranks exchange is slowed down to their
pace once `max_pending_rows` wait (`turns`), but not by ranks that stall: a round that stands still is broken off then
(`worker`), and a call leaves the outbox when it is old (`protocol.choosing`), for a table with that limit. Until then,
or until the ranks have met (`join_timeout`), more rows may wait: one of 20 numbers takes 1.1 KiB (measured).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL, Flush
from dist_wandb.exchange.posting import Contribution

_MANY_AT_ONCE = 256  # unread contributions that end the thread's lingering
_MOST_AT_ONCE = 1024  # contributions read before the next round


class Inbox:
    """The contributions that have not reached the rounds yet.

    `put` and `wake` are called on the user's threads, where a signal handler that logs may interrupt them. They take no
    lock for which that handler would wait: `SimpleQueue.put` is reentrant, `Event.set` is not.

    The thread of the exchange calls `post` with each contribution once its values are computed. It never blocks on a
    device, because other ranks would then wait as well.
    """

    def __init__(self, post: Callable[[Contribution], None]) -> None:
        self.flushes: list[Flush] = []
        self._post = post
        self._unread: SimpleQueue[Contribution | Flush | None] = SimpleQueue()
        self._computing: deque[Contribution] = deque()
        self._urgent: SimpleQueue[None] = SimpleQueue()  # an item ends the lingering
        self._put: Callable[[Contribution], None] = self._unread.put
        self.was_used: bool = False  # whether there were any contributions

    # On the user's threads

    def put(self, contribution: Contribution) -> None:
        """Add a contribution."""
        self.was_used = True
        self._put(contribution)
        if self._unread.qsize() > _MANY_AT_ONCE:
            self._hurry()

    def wake(self, flush: Flush | None = None) -> None:
        """Wake the thread, optionally with a flush request."""
        self._unread.put(flush)
        self._hurry()

    def _hurry(self) -> None:
        """End the thread's lingering; called after the reason for it was put."""
        if self._urgent.empty():
            self._urgent.put(None)

    @property
    def unread(self) -> int:
        """Approximately how many contributions were not read yet."""
        return self._unread.qsize()

    @property
    def computing(self) -> int:
        """How many contributions wait for a device, or for those before them."""
        return len(self._computing)

    @property
    def is_empty(self) -> bool:
        """Whether no contribution is on its way to the rounds."""
        return self._unread.empty() and not self._computing

    # On the thread of the exchange

    def drain(self, timeout: float = 0.0) -> bool:
        """Post the contributions that are ready; return whether there was anything to read or post in time."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            has_read = self._read(min(left, DEVICE_POLL_INTERVAL) if self._computing else left)
            if self._post_computed() or has_read:
                return True
            if not left:
                return False

    def _read(self, timeout: float) -> bool:
        with suppress(Empty):
            self._accept(self._unread.get(timeout=timeout) if timeout else self._unread.get_nowait())
            with suppress(Empty):
                for _ in range(_MOST_AT_ONCE):
                    self._accept(self._unread.get_nowait())
            return True
        return False

    def _accept(self, item: Contribution | Flush | None) -> None:
        if isinstance(item, Contribution):
            self._computing.append(item)
        elif item is not None:
            self.flushes.append(item)

    def _post_computed(self) -> bool:
        has_posted = False
        while self._computing and self._computing[0].is_ready():
            self._post(self._computing.popleft())
            has_posted = True
        return has_posted

    def linger(self, seconds: float, *, is_open: Callable[[], bool]) -> None:
        """Wait for further contributions if they may come, unless a caller waits for the present ones."""
        with suppress(Empty):
            while True:
                self._urgent.get_nowait()
        self.drain()  # contributions from before the queue was emptied
        if seconds and is_open() and not self.flushes:
            with suppress(Empty):
                self._urgent.get(timeout=seconds)
            self.drain()

    def pass_on(self, put: Callable[[Contribution], None]) -> None:
        """Pass all contributions on to another exchange, also those that are yet to come."""
        for is_last in (False, True):
            while self._read(0.0):
                pass
            while self._computing:
                put(self._computing.popleft())
            if not is_last:
                self._put = put

    def answer(self, flushes: list[Flush]) -> None:
        """Complete flush requests."""
        for flush in flushes:
            flush.set()
            self.flushes.remove(flush)
