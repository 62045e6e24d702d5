"""Contributions of the user's threads on their way to the thread of the exchange, in their order, and flush requests.

A contribution is ready once the event that was recorded on its device is. Those behind one that is not wait too, so
rows keep their order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL, Flush
from dist_wandb.exchange.posting import Contribution

_MANY_AT_ONCE = 256  # contributions that were not read yet, from which on the thread does not linger
_MOST_AT_ONCE = 1024  # contributions read before the next round


class Inbox:
    """Contributions on their way to the rounds.

    `put` and `wake` are called on the user's threads. They take no lock that a signal handler would wait for which
    interrupts them and logs: `SimpleQueue.put` may be interrupted by itself, `Event.set` may not.

    Args:
        post: Called, on the thread of the exchange, with each contribution that devices have computed. Nothing waits
            for a device, because other ranks would wait as well.
    """

    def __init__(self, post: Callable[[Contribution], None]) -> None:
        self.flushes: list[Flush] = []
        self._post = post
        self._unread: SimpleQueue[Contribution | Flush | None] = SimpleQueue()
        self._computing: deque[Contribution] = deque()
        self._urgent: SimpleQueue[None] = SimpleQueue()  # somebody waits: no lingering

    # On the user's threads

    def put(self, contribution: Contribution) -> None:
        """Take a contribution."""
        self._unread.put(contribution)
        if self._unread.qsize() > _MANY_AT_ONCE:
            self._hurry()

    def wake(self, flush: Flush | None = None) -> None:
        """Wake the thread, with a request to flush or without."""
        self._unread.put(flush)
        self._hurry()

    def _hurry(self) -> None:
        """Let the thread not linger. Called after what it is to hurry for was put into the inbox."""
        if self._urgent.empty():
            self._urgent.put(None)

    @property
    def unread(self) -> int:
        """About how many contributions were not read yet."""
        return self._unread.qsize()

    @property
    def computing(self) -> int:
        """How many contributions wait for a device, or for those before them."""
        return len(self._computing)

    @property
    def is_empty(self) -> bool:
        """Whether nothing that was put is still on its way to the rounds."""
        return self._unread.empty() and not self._computing

    # On the thread of the exchange

    def drain(self, timeout: float = 0.0) -> bool:
        """Post what was put; whether something was put, or a device is done with what was."""
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
        """Let more contributions come, unless somebody waits for what is there.

        Args:
            seconds: How long.
            is_open: Whether more may come.
        """
        with suppress(Empty):
            while True:
                self._urgent.get_nowait()
        self.drain()  # what was put before that was emptied
        if seconds and is_open() and not self.flushes:
            with suppress(Empty):
                self._urgent.get(timeout=seconds)
            self.drain()

    def answer(self, flushes: list[Flush]) -> None:
        """Tell those who wait for some flushes that all is written."""
        for flush in flushes:
            flush.set()
            self.flushes.remove(flush)
