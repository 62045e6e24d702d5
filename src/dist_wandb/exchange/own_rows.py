"""The thread that writes a rank's own rows, so that neither a device nor wandb's process delays the training."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL, Flush, Lifecycle
from dist_wandb.exchange.posting import Contribution
from dist_wandb.exchange.rows import Rows
from dist_wandb.notices import Notices
from dist_wandb.settings.limits import Limits

_POLL_INTERVAL = 0.1  # seconds between two checks whether all writers are attached
_END_OF_ROW = Contribution({}, None)
_STANDSTILL = 1.0  # seconds after which a row that is being written is no longer waited for


class OwnRows:
    """The queue of rows to write, and the work of the thread that writes them; arguments as of `DirectExchange`."""

    def __init__(
        self,
        rows: Rows,
        limits: Limits,
        rank: int,
        lifecycle: Lifecycle,
        has_all_writers: Callable[[], bool] | None,
    ) -> None:
        self._rows = rows
        self._limits = limits
        self._rank = rank
        self._lifecycle = lifecycle
        self._has_all_writers = has_all_writers
        self._notices = Notices()
        self._waiting: deque[Contribution | Flush] = deque()  # each until it is written
        self._awake: SimpleQueue[None] = SimpleQueue()  # its `put` is reentrant
        self._written_at = time.monotonic()  # when the thread last began or ended to write a row
        self._lost = 0

    # On the user's threads

    @property
    def is_empty(self) -> bool:
        """Whether everything that was put is written."""
        return not self._waiting

    def put(self, item: Contribution | Flush) -> None:
        """Add a row, or a flush that is set when everything before it is written."""
        self._waiting.append(item)
        self.wake()

    def wake(self) -> None:
        """Make the thread check the demands on it."""
        self._awake.put(None)

    def begin(self) -> None:
        """Record that the thread begins."""
        self._written_at = time.monotonic()

    def has_room(self) -> bool:
        """Return whether another row may wait; while rows are being written, block until it may, as wandb does."""
        most = self._limits.max_pending_rows
        while len(self._waiting) >= most:
            if time.monotonic() - self._written_at > _STANDSTILL and self._has_all_writers is None:
                self._notices.warn(
                    "full",
                    f"more than {most} rows of rank {self._rank} wait for wandb's own process, or a device, which "
                    "has stalled. Further rows are lost until it continues. See max_pending_rows.",
                )
                self._lost += 1
                return False
            time.sleep(DEVICE_POLL_INTERVAL)
        return True

    def left(self) -> int:
        """Return how many rows are not written yet."""
        return sum(isinstance(item, Contribution) for item in self._waiting.copy())

    def warn_of_lost(self, given_up: int) -> bool:
        """Warn, at the end, of rows for which there was no room; return whether any row is lost."""
        if self._lost:
            self._notices.warn(
                "unwritten",
                f"{self._lost} rows of rank {self._rank} are lost: wandb's own process did not accept them in time, or "
                "a device has not computed their values.",
            )
        return bool(self._lost or given_up or any(self._rows.lost.values()))

    def end_row(self) -> None:
        """Write the row that is left open, if any. Never raises."""
        self._write(_END_OF_ROW)

    # On the thread

    def run(self) -> None:
        """Write rows until no more come."""
        lifecycle = self._lifecycle
        try:
            self._await_writers()
            while not (lifecycle.is_closing and not self._waiting) and not lifecycle.is_stopped:
                with suppress(Empty):
                    self._awake.get(timeout=0 if lifecycle.is_closing else None)
                self._write_waiting()
            if not lifecycle.is_stopped:
                self.end_row()
        finally:
            lifecycle.end()

    def _await_writers(self) -> None:
        until, most = time.monotonic() + self._limits.join_timeout, self._limits.max_pending_rows
        has_all_writers, lifecycle = self._has_all_writers, self._lifecycle
        while has_all_writers is not None and time.monotonic() < until and len(self._waiting) < most:
            if has_all_writers() or lifecycle.is_closing:
                break
            time.sleep(_POLL_INTERVAL)
        self._has_all_writers = None

    def _write_waiting(self) -> None:
        while self._waiting and not self._lifecycle.is_stopped:
            self._written_at = time.monotonic()
            item = self._waiting[0]
            if isinstance(item, Flush):
                self.end_row()
                self._waiting.popleft()
                item.set()
            elif self._has_arrived(item):
                self._write(item)
                self._written_at = time.monotonic()
                self._waiting.popleft()  # only now, so that no later row is written before it

    def _has_arrived(self, contribution: Contribution) -> bool:
        """Wait for the devices; return whether the contribution can be written, or has failed."""
        with suppress(Exception):  # of a device; writing the row raises it again
            while not contribution.has_arrived():
                if self._lifecycle.is_stopped:
                    return False
                time.sleep(DEVICE_POLL_INTERVAL)
        return True

    def _write(self, contribution: Contribution) -> None:
        try:
            self._rows.posting.write_own(contribution)
        except Exception as error:  # noqa: BLE001  # one row must not end the others
            self._rows.lost["that W&B refused"] += len(contribution.metrics)
            message = f"a row of rank {self._rank} could not be written, and is lost: {error!r}"
            self._notices.warn(type(error).__name__, f"{message}. More errors of this kind are not reported.")
