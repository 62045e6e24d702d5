"""The times of a rank's rounds, and the limits of its patience with other ranks. Pure: time is an argument.

*Due.* A rank with calls takes part in a round once the oldest of them has waited for `Limits.linger`, so that rounds
are for many rows: a round costs as much as some rows. If the others have not offered their part of its calls, or these
are not finished, it waits as long again, and then in the round. A rank that has nothing takes part once per heartbeat,
so the rank that others wait for decides when the round takes place, mostly by its `log`. During a flush, rounds follow
each other after a pause that doubles from `_FIRST_PAUSE` up to a heartbeat.

*Patience.* The times of rounds are recorded while cells are open. Cells that were opened in a round longer ago than the
patience are overdue: after a few heartbeats those of names that were never finished, after `peer_timeout` all. Time in
which the exchange stands still does not count, because no rank could contribute in it: of a gap between two rounds, two
heartbeats count; of an exchange of tables and images, nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import itemgetter
from typing import NamedTuple

from dist_wandb.exchange.protocol.lanes import NOTHING
from dist_wandb.settings.options import Limits

NEW_NAME_HEARTBEATS = 5  # patience with a name that was never finished
_FIRST_PAUSE = 0.01  # seconds until the next round while others are waited for
_FLUSH_HEARTBEATS = 2  # how long a flushing rank waits for others to flush as well
_STANDSTILL_HEARTBEATS = 2  # longer gaps between two rounds are a standstill
_APART = 0.02  # minimum seconds between two recorded times of rounds


class Overdue(NamedTuple):
    """The latest rounds whose cells, and all cells opened before them, are overdue; `NOTHING` if there are none."""

    new: float = NOTHING  # for cells of names that were never finished
    usual: float = NOTHING  # for cells of all names


class Pacer:
    """The pace of one rank's exchange; `now` is the time in seconds, in all methods."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.new_name_patience: float = NEW_NAME_HEARTBEATS * limits.heartbeat
        self._limits = limits
        self._pause = 0.0
        self._has_taken = True
        self._last_end = now
        self._last_round = now
        self._rounds: deque[tuple[int, float]] = deque()  # number and time
        self._settled_since: float | None = None

    def left(self, now: float, oldest: float | None, *, awaits: bool, is_flushing: bool) -> float:
        """Return how long to wait for more calls before the next round, in seconds.

        The oldest call that waits was posted at `oldest`. `awaits`: after the last round, rows with values of this rank
        waited for others. `is_flushing`: a caller waits until everything is written.
        """
        if is_flushing:
            due = self._last_end + self._pause
        elif oldest is not None and self._has_taken:
            due = oldest + self._limits.linger
        elif oldest is not None or awaits:  # others are behind: no busy loop
            due = self._last_end + self._limits.linger
        else:
            due = self._last_end + self._limits.heartbeat
        return due - now

    def end_round(self, now: float, *, has_taken: bool, is_flushing: bool) -> None:
        """Record the end of a round, and whether all calls that were offered were taken."""
        self._last_end, self._has_taken = now, has_taken
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), self._limits.heartbeat) if is_flushing else 0.0

    def begin_round(self, now: float, number: int, oldest: int | None) -> Overdue:
        """Record the start of a round, and return the overdue cells; the oldest open cell is of the round `oldest`."""
        overdue = Overdue()
        if oldest is None:
            self._rounds.clear()
        else:
            stood_still = now - self._last_round - _STANDSTILL_HEARTBEATS * self._limits.heartbeat
            if stood_still > 0:
                self._move_rounds(stood_still)
            if not self._rounds or now - self._rounds[-1][1] >= _APART:
                self._rounds.append((number, now))
            while len(self._rounds) > 1 and self._rounds[1][0] <= oldest:
                self._rounds.popleft()
            overdue = Overdue(
                self._last_before(now - self.new_name_patience), self._last_before(now - self._limits.peer_timeout)
            )
        self._last_round = now
        return overdue

    def _last_before(self, since: float) -> float:
        index = bisect_right(self._rounds, since, key=itemgetter(1))
        return self._rounds[index - 1][0] if index else NOTHING

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
        """Return whether a flushing rank has waited long enough for others to flush, once its calls are finished."""
        if not is_settled:
            self._settled_since = None
            return False
        if self._settled_since is None:
            self._settled_since = now
        return now - self._settled_since > _FLUSH_HEARTBEATS * self._limits.heartbeat
