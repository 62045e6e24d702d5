"""The times of a rank's rounds, and the limits of its patience with other ranks. Pure: time is an argument.

*Due.* A rank with contributions takes part in a round at once, except that it waits briefly for more if rows follow
each other quickly and nobody flushes: consecutive rounds find warm caches and wake fewer threads, so they cost a busy
machine half as much. An idle rank takes part once per heartbeat. If it has contributed to cells that are open, or has a
pending flush, it takes part after a pause that doubles from `_FIRST_PAUSE` up to a heartbeat, and waits in the round
for the others. So the rank that others wait for decides when the round takes place, mostly by contributing.

*Patience.* The times of rounds are recorded while cells are open. Cells that were opened in a round longer ago than the
patience are overdue: after a few heartbeats those of names that were never finished, after `peer_timeout` all. Time in
which the exchange stands still does not count, because no rank could contribute in it: of a gap between two rounds, two
heartbeats count; of an exchange of tables and images, nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from dist_wandb.settings.limits import Limits

NEW_NAME_HEARTBEATS = 5  # patience with a name that was never finished
_FIRST_PAUSE = 0.01  # seconds until the next round while others are waited for
_QUICK = 0.1  # seconds between rows that follow each other quickly
_FLUSH_HEARTBEATS = 2  # how long a flushing rank waits for others to flush as well
_STANDSTILL_HEARTBEATS = 2  # longer gaps between two rounds are a standstill
_APART = 0.02  # minimum seconds between two recorded times of rounds


class Overdue(NamedTuple):
    """The latest rounds whose cells, and all cells opened before them, are overdue; `None` if there are none."""

    new: int | None = None  # for cells of names that were never finished
    usual: int | None = None  # for cells of all names


class Pacer:
    """The pace of one rank's exchange; `now` is the time in seconds, in all methods."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.new_name_patience: float = NEW_NAME_HEARTBEATS * limits.heartbeat
        self._limits = limits
        self._pause = _FIRST_PAUSE
        self._last_row = -math.inf
        self._last_round = now
        self._rounds: deque[tuple[int, float]] = deque()  # number and time
        self._settled_since: float | None = None

    def pause(self, *, awaits_others: bool) -> float:
        """Return how long an idle rank waits for contributions before the next round, in seconds.

        Args:
            awaits_others: Whether cells are open, none of which lacks this rank, or a flush is pending.

        """
        if not awaits_others:
            self._pause = _FIRST_PAUSE
            return self._limits.heartbeat
        pause, self._pause = self._pause, min(2 * self._pause, self._limits.heartbeat)
        return pause

    def contributed(self, now: float, *, was_idle: bool) -> float:
        """Record that contributions came; return how long to wait for more before the next round, in seconds."""
        self._pause = _FIRST_PAUSE
        if not was_idle:
            return 0.0
        is_quick, self._last_row = now - self._last_row < _QUICK, now
        return self._limits.linger if is_quick else 0.0

    def begin_round(self, now: float, number: int, oldest: int | None) -> Overdue:
        """Record the start of a round, and return the overdue cells.

        Args:
            now: The time.
            number: Number of earlier rounds.
            oldest: The round in which the oldest open cell was opened; `None` if none is open.
        """
        overdue = Overdue()
        if oldest is None:
            self._rounds.clear()
        else:
            self._note_round(now, number, oldest)
            overdue = Overdue(
                self._last_before(now - self.new_name_patience), self._last_before(now - self._limits.peer_timeout)
            )
        self._last_round = now
        return overdue

    def _note_round(self, now: float, number: int, oldest: int) -> None:
        stood_still = now - self._last_round - _STANDSTILL_HEARTBEATS * self._limits.heartbeat
        if stood_still > 0:
            self._move_rounds(stood_still)
        if not self._rounds or now - self._rounds[-1][1] >= _APART:
            self._rounds.append((number, now))
        while len(self._rounds) > 1 and self._rounds[1][0] <= oldest:
            self._rounds.popleft()

    def _last_before(self, since: float) -> int | None:
        index = bisect_right(self._rounds, since, key=itemgetter(1))
        return self._rounds[index - 1][0] if index else None

    def _move_rounds(self, seconds: float) -> None:
        self._rounds = deque((number, at + seconds) for number, at in self._rounds)

    def exclude(self, seconds: float) -> None:
        """Exclude a time in which no rank could contribute, though none was silent."""
        self._move_rounds(seconds)
        self._last_round += seconds

    def is_held_up(self, now: float) -> bool:
        """Return whether the current round takes so long that some rank seems to be held up."""
        return now - self._last_round > NEW_NAME_HEARTBEATS * self._limits.heartbeat

    def has_flushed_alone(self, now: float, *, is_settled: bool) -> bool:
        """Return whether a flushing rank has given the others enough time to flush as well.

        Args:
            now: The time.
            is_settled: Whether everything that this rank logged is finished.
        """
        if not is_settled:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = now
        return now - self._settled_since > _FLUSH_HEARTBEATS * self._limits.heartbeat


class Interval:
    """Permits an action once every `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = -math.inf

    def is_over(self, now: float) -> bool:
        """Return whether the interval is over; if so, begin the next one."""
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
