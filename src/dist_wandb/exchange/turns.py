"""The work of an exchange's thread between two rounds: it reads what was logged, waits for its turn, answers flushes.

A contribution is ready once the event recorded on its device is. Those behind it wait, too: rows keep their order.

Neither this queue nor the outbox loses a row. A script that logs faster than the ranks exchange is slowed down to their
pace once `max_pending_rows` wait, but not by ranks that stall: a round that stands still is broken off then
(`collective`), and a call leaves the outbox when it is old (`protocol.plan`), for a table with that limit. Until then,
or until the ranks have met (`join_timeout`), more rows may wait: one of 20 numbers takes 1.1 KiB (measured).

*Due* (`Turns`). A rank with calls takes part in a round once the oldest of them has waited for `Limits.linger`, so that
rounds are for many rows: a round costs as much as some rows. If the others have not offered their part of its calls, or
these are not finished, it waits as long again, and then in the round. A rank that has nothing takes part once per
heartbeat, so the rank that others wait for decides when the round takes place, mostly by its `log`. During a flush,
rounds follow each other after a pause that doubles from `_FIRST_PAUSE` up to a heartbeat.

*Patience* (`Pacer`). The times of rounds are recorded while cells are open. Cells that were opened in a round longer
ago than the patience are overdue: after a few heartbeats those of names that were never finished, after `peer_timeout`
all. Time in which the exchange stands still does not count, because no rank could contribute in it: of a gap between
two rounds, two heartbeats count; of an exchange of tables and images, nothing.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from queue import Empty, SimpleQueue

from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL, Flush
from dist_wandb.exchange.membership import generations
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.contributors import NEVER
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.reports import NEW_NAME_HEARTBEATS, Context
from dist_wandb.exchange.rows import Contribution
from dist_wandb.settings.options import Limits

_log = logging.getLogger("dist_wandb")

_MANY_AT_ONCE = 256  # unread contributions that end the thread's lingering
_MOST_AT_ONCE = 1024  # contributions read before the next round
_MANY = 256  # calls that wait for no more
_OFTEN = 64  # every so many rows, `log` checks whether too many wait: counting them takes longer than passing one on
_STANDSTILL = 1.5  # seconds without a row taken after which `log` waits no longer
_FIRST_PAUSE = 0.01  # seconds until the next round while others are waited for
_FLUSH_HEARTBEATS = 2  # how long a flushing rank waits for others to flush as well
_STANDSTILL_HEARTBEATS = 2  # longer gaps between two rounds are a standstill
_APART = 0.02  # minimum seconds between two recorded times of rounds


class Pacer:
    """The patience of one rank's exchange; `now` is the time in seconds, in all methods."""

    def __init__(self, limits: Limits, now: float) -> None:
        self.new_name_patience: float = NEW_NAME_HEARTBEATS * limits.heartbeat
        self.patience: float = limits.peer_timeout
        self._limits = limits
        self._last_round = now
        self._active = 0.0  # seconds in which the exchange did not stand still
        self._rounds: deque[tuple[int, float]] = deque()  # number, and these seconds until then

    def begin_round(self, now: float, number: int, oldest: int | None) -> tuple[int, int]:
        """Record the start of a round; the oldest open cell is of the round `oldest`.

        Returns the latest rounds whose cells, and all cells opened before them, are overdue, for new names and for all;
        `NEVER` if there are none.
        """
        self._active += min(now - self._last_round, _STANDSTILL_HEARTBEATS * self._limits.heartbeat)
        self._last_round = now
        if oldest is None:
            self._rounds.clear()
            return NEVER, NEVER
        if not self._rounds or self._active - self._rounds[-1][1] >= _APART:
            self._rounds.append((number, self._active))
        while len(self._rounds) > 1 and self._rounds[1][0] <= oldest:
            self._rounds.popleft()
        patience = self._active - self.new_name_patience, self._active - self.patience
        of_new, of_all = (bisect_right(self._rounds, since, key=itemgetter(1)) for since in patience)
        return self._rounds[of_new - 1][0] if of_new else NEVER, self._rounds[of_all - 1][0] if of_all else NEVER

    def exclude(self, seconds: float) -> None:
        """Exclude a time in which no rank could contribute, though none was silent."""
        self._last_round += seconds

    def is_held_up(self, now: float) -> bool:
        """Return whether the current round takes so long that some rank seems to be held up."""
        return now - self._last_round > NEW_NAME_HEARTBEATS * self._limits.heartbeat


class Turns:
    """What one rank logs and the rounds have not taken yet, and its turns in the rounds.

    `put` and `wake` are called on the user's threads, where a signal handler that logs may interrupt them. They take no
    lock for which that handler would wait: `SimpleQueue.put` is reentrant, `Event.set` is not. The exchange's thread
    posts each contribution once its values are computed, and never blocks on a device.
    """

    def __init__(self, context: Context, rounds: Rounds) -> None:
        self.pacer: Pacer = Pacer(context.limits, time.monotonic())
        self.flushes: list[Flush] = []
        self.computing: deque[Contribution] = deque()  # those that wait for a device, or for those before them
        self.puts: int = 0  # how many contributions there were
        self._context = context
        self._rounds = rounds
        self._unread: SimpleQueue[Contribution | Flush | None] = SimpleQueue()
        self._urgent: SimpleQueue[None] = SimpleQueue()  # an item ends the lingering
        self._most: int = context.limits.max_pending_rows + _MANY
        self._room = self._most  # how many rows may wait at present
        # As of the last round: when it ended; whether some rank has more to contribute at once, rows with values of
        # this rank wait for others, and all calls that were offered were taken; the pause of a flush after it, and
        # since when what is flushed is finished.
        self._last_end = time.monotonic()
        self._has_more = False
        self._awaits, self._has_taken = False, True
        self._pause = 0.0
        self._settled_since: float | None = None

    # On the user's threads

    def put(self, contribution: Contribution) -> None:
        self._unread.put(contribution)
        if self._unread.qsize() > _MANY_AT_ONCE and self._urgent.empty():
            self._urgent.put(None)
        self.puts += 1
        if self.puts % _OFTEN == 0:
            self.await_room()

    def wake(self, flush: Flush | None = None) -> None:
        self._unread.put(flush)
        self._urgent.put(None)  # after the reason for it was put

    def await_room(self) -> None:
        """Wait while too many rows are on their way.

        A loop that logs faster than W&B takes the rows would fill the memory, so `log` takes as long as they do, as
        with wandb alone. If the exchange stands still, as many rows again may wait: `log` waits for no rank.
        """
        if self._on_their_way <= self._most:
            self._room = self._most
            return
        until = time.monotonic() + _STANDSTILL
        while self._on_their_way > self._room and not self._context.lifecycle.is_closing:
            if time.monotonic() >= until:
                self._room = 2 * self._on_their_way
            time.sleep(DEVICE_POLL_INTERVAL)

    @property
    def _on_their_way(self) -> int:
        return self.backlog + self._context.rows.writing.due

    @property
    def backlog(self) -> int:
        """Approximately how many rows of this rank the others have not received."""
        return self._unread.qsize() + len(self.computing) + len(self._rounds.outbox.waiting)

    def left(self) -> int:
        """Return approximately how many rows this rank has yet to write."""
        rows, index = self._context.rows, self._context.unit.index
        if rows.writes:
            table = self._rounds.table
            entered = list(table.open)
            ahead = sum(rank > index for rank, _ in entered)  # usually, its own call is in the backlog
            taken = table.taken.get(index, 0)  # a round that is being unpacked has entered calls of the backlog
            held = sum(rank < index or (rank == index and call < taken) for rank, call in entered)
            return max(self.backlog, ahead) + held + rows.writing.due
        return self._unread.qsize() + len(self.computing) if rows.writer.has_run else 0  # values under its label

    # On the thread of the exchange: what was logged

    @property
    def is_empty(self) -> bool:
        return self._unread.empty() and not self.computing

    def drain(self, timeout: float = 0.0) -> bool:
        """Post the contributions that are ready; return whether there was anything to read or post in time."""
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            has_found = self._read(min(left, DEVICE_POLL_INTERVAL) if self.computing else left)
            while self.computing and self.computing[0].is_ready():
                has_found, contribution = True, self.computing.popleft()
                try:
                    self._context.rows.post(contribution, self._rounds, time.monotonic())
                except Exception:  # noqa: BLE001  # a row that cannot be processed must not stop the later ones
                    self._context.rows.writer.lost["that could not be processed"] += len(contribution.metrics)
                    _log.exception(
                        "dist_wandb: a row of rank %d could not be processed and is lost: %r",
                        *(self._context.rank, list(contribution.metrics)),
                    )
            if has_found or not left:
                return has_found

    def _read(self, timeout: float) -> bool:
        """Read what is there, once there is something; return whether there is in time."""
        has_found = False
        with suppress(Empty):
            for _ in range(_MOST_AT_ONCE):
                item = self._unread.get(timeout=timeout) if timeout and not has_found else self._unread.get_nowait()
                has_found = True
                if isinstance(item, Contribution):
                    self.computing.append(item)
                elif item is not None:
                    self.flushes.append(item)
        return has_found

    def linger(self, seconds: float) -> None:
        """Wait for further contributions if they may come, unless a caller waits for the present ones."""
        with suppress(Empty):
            while True:
                self._urgent.get_nowait()
        self.drain()  # contributions from before the queue was emptied
        if not (self.flushes or self._context.lifecycle.is_closing):
            with suppress(Empty):
                self._urgent.get(timeout=seconds)
            self.drain()

    def pass_on(self, put: Callable[[Contribution], None]) -> None:
        while self._read(0.0):
            pass
        while self.computing:
            put(self.computing.popleft())

    def answer(self, flushes: list[Flush]) -> None:
        for flush in flushes:
            flush.set()
            self.flushes.remove(flush)

    # Turns

    def is_due(self) -> bool:
        """Return whether a row has waited long enough for ranks that have not opened a session, or this one ends.

        A rank that ends without a row, and does not write those of others, waits for nobody.
        """
        oldest, writes = math.inf, self._context.rows.writes
        if writes:  # those of other ranks may be passed on to another session
            self.drain()
            oldest = next((call.at for call in self._rounds.outbox.waiting), oldest)
        ends = self._context.lifecycle.is_closing and (writes or self.puts > 0)
        return ends or time.monotonic() - oldest >= generations.APART

    def wait(self, awaits_primary: Callable[[], bool]) -> None:
        """Wait for contributions, peers or the next heartbeat; while it `awaits_primary`, this rank does not close."""
        lifecycle, limits, rounds = self._context.lifecycle, self._context.limits, self._rounds
        self.drain()
        while not (self._has_more or (lifecycle.is_closing and not awaits_primary()) or lifecycle.is_stopped):
            waiting = rounds.outbox.waiting
            if self.flushes:
                due = self._last_end + self._pause
            elif waiting and self._has_taken:
                due = waiting[0].at + limits.linger
            elif waiting or self._awaits:  # others are behind: no busy loop
                due = self._last_end + limits.linger
            else:
                due = self._last_end + limits.heartbeat
            left = due - time.monotonic()
            if left <= 0 or len(waiting) >= _MANY:
                break
            if waiting and not lifecycle.is_closing:  # further calls do not wake this thread
                self.linger(left)
            elif not self.drain(left):
                break
        awaits_device = lifecycle.is_closing and not lifecycle.is_stopped and self.computing and not self._has_more
        self.drain(limits.linger if awaits_device else 0.0)
        rounds.intent = Intent.OPEN
        if self.is_empty:
            if lifecycle.is_closing and not awaits_primary():  # close may have been called meanwhile
                rounds.intent = Intent.FAILING if lifecycle.has_failed else Intent.CLOSING
            elif self.flushes:
                rounds.intent = Intent.PAUSING
            if lifecycle.is_closing or any(flush.commit for flush in self.flushes):
                self._context.rows.end_row(rounds.outbox)
        if self.backlog > limits.max_pending_rows:
            self._context.warn(
                "outbox",
                f"rank {self._context.rank} logs rows faster than the ranks exchange them: more than "
                f"{limits.max_pending_rows} wait, so log takes as long as the exchange of a row. Log less often.",
            )

    def end_round(self, outcome: Outcome) -> None:
        """Take note of the result of a round, and answer this rank's flush requests if they are fulfilled.

        They are once all ranks have paused: cells of only some of them are finished then. A rank without open cells
        waits a little for that if others have open cells, or more to contribute at once.
        """
        rounds, heartbeat, now = self._rounds, self._context.limits.heartbeat, time.monotonic()
        self._last_end, self._has_more = now, outcome.more
        self._awaits = outcome.awaits and not rounds.settled
        self._has_taken = outcome.taken > 0 or not rounds.outbox.waiting
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), heartbeat) if self.flushes else 0.0
        if not (self.flushes and rounds.settled and self.is_empty):
            self._settled_since = None
            return
        if self._settled_since is None:
            self._settled_since = now
        has_waited = now - self._settled_since > _FLUSH_HEARTBEATS * heartbeat
        if outcome.paused or has_waited or not (rounds.table.open or outcome.more):
            if any(flush.commit for flush in self.flushes):
                self._context.rows.writing.end_row()
            self.answer([flush for flush in self.flushes if outcome.paused or not flush.together])
