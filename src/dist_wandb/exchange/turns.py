"""A rank's actions before and after a round: it waits for its turn, gives up on ranks, and answers flushes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.inbox import Inbox
from dist_wandb.exchange.interface import DEVICE_POLL_INTERVAL
from dist_wandb.exchange.lifecycle import Demand
from dist_wandb.exchange.membership import presence
from dist_wandb.exchange.messages import Messages
from dist_wandb.exchange.protocol.offers import Intent
from dist_wandb.exchange.protocol.pacing import Pacer
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds

_MANY = 256  # calls that wait for no more
_STANDSTILL = 1.5  # seconds without a row taken after which `log` waits no longer


class Turns:
    """One rank's turns in the rounds."""

    def __init__(self, context: Context, rounds: Rounds, inbox: Inbox, pacer: Pacer, messages: Messages) -> None:
        self._context = context
        self._rounds = rounds
        self._inbox = inbox
        self._pacer = pacer
        self._messages = messages
        self._awaits = False
        self._most: int = context.limits.max_pending_rows + _MANY
        self._room = self._most  # how many rows may wait at present

    def await_room(self) -> None:
        """Wait while too many rows are on their way; called by `put`, on the user's threads.

        The rows of a loop that logs faster than W&B takes them would fill the memory, so `log` takes as long as they
        do, as with wandb alone. If the exchange stands still, as many rows again may wait: `log` waits for no rank.
        """
        until = time.monotonic() + _STANDSTILL if self._on_their_way > self._room else math.inf
        while self._on_their_way > self._room and not self._context.lifecycle.is_closing:
            if time.monotonic() >= until:
                self._room = 2 * self._on_their_way
            time.sleep(DEVICE_POLL_INTERVAL)
        if self._on_their_way <= self._most:
            self._room = self._most

    @property
    def _on_their_way(self) -> int:
        return self.backlog + self._context.rows.writing.due

    @property
    def backlog(self) -> int:
        """Approximately how many rows of this rank the others have not received."""
        return self._inbox.unread + self._inbox.computing + len(self._rounds.outbox.waiting)

    def left(self) -> int:
        """Return approximately how many rows this rank has yet to write."""
        rows = self._context.rows
        if rows.writes:
            return self.backlog + len(self._rounds.table.open) + rows.writing.due
        return self._inbox.unread + self._inbox.computing if rows.has_run else 0  # values under its label

    def is_due(self) -> bool:
        """Return whether a row has waited long enough for ranks that have not opened a session, or this one ends."""
        oldest = math.inf
        if self._context.rows.writes:  # those of other ranks may be passed on to another session
            self._inbox.drain()
            oldest = next((call.at for call in self._rounds.outbox.waiting), oldest)
        return self._context.lifecycle.is_closing or time.monotonic() - oldest >= presence.APART

    def wait(self, *, has_more: bool, awaits_primary: Callable[[], bool]) -> None:
        """Wait for contributions, for peers, or for the next heartbeat, unless some rank has more at once.

        This rank does not close yet while the rank that writes is away but may return (`awaits_primary`).
        """
        lifecycle, rounds, inbox = self._context.lifecycle, self._rounds, self._inbox
        inbox.drain()
        while not (has_more or (lifecycle.is_closing and not awaits_primary()) or lifecycle.is_stopped):
            waiting = rounds.outbox.waiting
            oldest = waiting[0].at if waiting else None
            left = self._pacer.left(time.monotonic(), oldest, awaits=self._awaits, is_flushing=bool(inbox.flushes))
            if left <= 0 or len(waiting) >= _MANY:
                break
            if waiting and lifecycle.demand is Demand.NONE:  # further calls do not wake this thread
                inbox.linger(left, is_open=lambda: lifecycle.demand is Demand.NONE)
            elif not inbox.drain(left):
                break
        inbox.drain()
        rounds.intent = Intent.OPEN
        if inbox.is_empty:
            if lifecycle.is_closing and not awaits_primary():  # close may have been called meanwhile
                rounds.intent = Intent.PAUSING if lifecycle.has_failed else Intent.CLOSING
            elif inbox.flushes:
                rounds.intent = Intent.PAUSING
        if self.backlog > self._context.limits.max_pending_rows:
            self._messages.many_unsent()

    def give_up_overdue(self) -> None:
        """Stop waiting for ranks that do not contribute to rows of others."""
        rounds, table = self._rounds, self._rounds.table
        oldest = next(table.unwritten(), None)
        born = None if oldest is None else table.cells[oldest].born
        overdue = self._pacer.begin_round(time.monotonic(), table.round, born)
        if overdue.new is not None:
            rounds.give_up(overdue.new, new_only=True)
        if overdue.usual is not None:
            rounds.give_up(overdue.usual, new_only=False)

    def end_round(self, outcome: Outcome) -> None:
        """Take note of the result of a round, and answer flush requests."""
        self._awaits = outcome.awaits and not self._rounds.settled
        has_taken = outcome.taken > 0 or not self._rounds.outbox.waiting
        self._pacer.end_round(time.monotonic(), has_taken=has_taken, is_flushing=bool(self._inbox.flushes))
        if outcome.crowded:
            self._messages.many_open()
        self.answer_flushes(is_paused=outcome.paused, has_more=outcome.more)

    def answer_flushes(self, *, is_paused: bool, has_more: bool) -> None:
        """Answer this rank's flush requests, but give other ranks the chance to pause as well.

        When all ranks have paused, cells with contributions of only some of them are finished. A rank without open
        cells waits a little for that if others have open cells, or more to contribute at once.
        """
        flushes = self._inbox.flushes
        is_settled = bool(flushes) and self._rounds.settled and self._inbox.is_empty
        has_waited = self._pacer.has_flushed_alone(time.monotonic(), is_settled=is_settled)
        if is_settled and (is_paused or has_waited or not (self._rounds.table.open or has_more)):
            self._context.rows.writing.end_row()
            self._inbox.answer([flush for flush in flushes if is_paused or not flush.together])
