"""When a rank takes part in the next round, and which ranks were waited for long enough. Pure: time is an argument.

*Due.* A rank with contributions takes part at once, but for a short wait for more where rows follow each other quickly
and nobody flushes: rounds in a row find warm caches and wake fewer threads, so they cost a busy machine half. While
cells are open to which an idle rank has contributed, or somebody flushes there, it takes part after a pause that
doubles from `_FIRST_PAUSE` up to a heartbeat, and waits in the round for the others; otherwise once in a heartbeat. So
the rank that others wait for decides when the round takes place, mostly by what it contributes.

*Patience.* It is noted when rounds take place, as long as cells are open. Cells opened in a round that is longer ago
than the patience are overdue: after a few heartbeats those of names that were never finished, after `peer_timeout` all.
Time in which the exchange stands still does not count, because no rank could contribute in it: of a gap between two
rounds two heartbeats count, of an exchange of tables and images nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from dist_wandb.settings.limits import Limits

NEW_NAME_HEARTBEATS = 5  # patience with a name that was never finished before
_FIRST_PAUSE = 0.01  # seconds until the next round while others are waited for
_QUICK = 0.1  # seconds between rows that follow each other quickly
_FLUSH_HEARTBEATS = 2  # how long a rank that flushes waits for others to do so as well
_STANDSTILL_HEARTBEATS = 2  # beyond that between two rounds, the exchange stands still
_APART = 0.02  # seconds between two notes of when a round took place


class Overdue(NamedTuple):
    """Cells that were waited for long enough, by the round in which they were opened, or an earlier one.

    Args:
        new: Of names that were never finished; `None` for none.
        usual: Of all names; `None` for none.
    """

    new: int | None = None
    usual: int | None = None


class Pacer:
    """The pace of one rank's exchange.

    Args:
        limits: How long to wait.
        now: The time, in seconds, as in all methods.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self.new_name_patience: float = NEW_NAME_HEARTBEATS * limits.heartbeat
        self._limits = limits
        self._pause = _FIRST_PAUSE
        self._last_row = -math.inf
        self._last_round = now
        self._rounds: deque[tuple[int, float]] = deque()  # number and time
        self._settled_since: float | None = None

    def pause(self, *, awaits_others: bool) -> float:
        """How long an idle rank waits for contributions before it takes part in the next round.

        Args:
            awaits_others: Whether cells are open that lack others only, or somebody waits for a flush.
        """
        if not awaits_others:
            self._pause = _FIRST_PAUSE
            return self._limits.heartbeat
        pause, self._pause = self._pause, min(2 * self._pause, self._limits.heartbeat)
        return pause

    def contributed(self, now: float, *, was_idle: bool) -> float:
        """Note that contributions came; how long to wait for more before the next round."""
        self._pause = _FIRST_PAUSE
        if not was_idle:
            return 0.0
        is_quick, self._last_row = now - self._last_row < _QUICK, now
        return self._limits.linger if is_quick else 0.0

    def begin_round(self, now: float, number: int, oldest: int | None) -> Overdue:
        """Note that a round begins.

        Args:
            now: The time.
            number: How many rounds there were.
            oldest: The round in which the oldest open cell was opened; `None` if none is open.

        Returns:
            What is overdue.
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
        position = bisect_right(self._rounds, since, key=itemgetter(1))
        return self._rounds[position - 1][0] if position else None

    def _move_rounds(self, seconds: float) -> None:
        self._rounds = deque((number, at + seconds) for number, at in self._rounds)

    def exclude(self, seconds: float) -> None:
        """Do not count time in which no rank could contribute, though none was silent."""
        self._move_rounds(seconds)
        self._last_round += seconds

    def is_held_up(self, now: float) -> bool:
        """Whether the round that began last takes so long that some rank seems to be held up."""
        return now - self._last_round > NEW_NAME_HEARTBEATS * self._limits.heartbeat

    def has_flushed_alone(self, now: float, *, is_settled: bool) -> bool:
        """Whether a rank that flushes has given the others enough time to flush as well.

        Args:
            now: The time.
            is_settled: Whether all that this rank logged is finished.
        """
        if not is_settled:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = now
        return now - self._settled_since > _FLUSH_HEARTBEATS * self._limits.heartbeat


class Interval:
    """Allows something once in a while.

    Args:
        seconds: How long after one time the next one is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = -math.inf

    def is_over(self, now: float) -> bool:
        """Whether it is time again; then the next interval begins."""
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
