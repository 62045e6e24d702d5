"""A rank's actions before and after a round: it waits for its turn, gives up on ranks, and answers flushes."""

from __future__ import annotations

import time
from collections.abc import Callable

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.inbox import Inbox
from dist_wandb.exchange.lifecycle import Demand
from dist_wandb.exchange.messages import Messages
from dist_wandb.exchange.protocol.pacing import Pacer
from dist_wandb.exchange.protocol.rounds import Intent, Rounds


class Turns:
    """One rank's turns in the rounds."""

    def __init__(self, context: Context, rounds: Rounds, inbox: Inbox, pacer: Pacer, messages: Messages) -> None:
        self._context = context
        self._rounds = rounds
        self._inbox = inbox
        self._pacer = pacer
        self._messages = messages
        self._unsent = self._doubtful = 0  # as of the last turn: the user's threads do not access the rounds

    @property
    def backlog(self) -> int:
        """Approximate number of rows of this rank that the others have not received."""
        return self._inbox.unread + self._inbox.computing + self._unsent

    @property
    def unwritten(self) -> int:
        """Approximate number of rows that this rank has to write if it stops waiting for other ranks."""
        return self.backlog + self._doubtful

    def wait(self, *, has_more: bool, awaits_primary: Callable[[], bool]) -> None:
        """Wait for contributions, for peers, or for the next heartbeat.

        Args:
            has_more: Whether some rank has more to contribute at once.
            awaits_primary: Returns whether the rank that writes is away but may return: then this rank does not close
                yet.
        """
        lifecycle, rounds = self._context.lifecycle, self._rounds
        is_ending = lifecycle.is_closing and not awaits_primary()
        is_idle = not (has_more or rounds.outbox.pending or is_ending)
        awaits_others = bool(self._inbox.flushes or (rounds.ledger.open and not rounds.ledger.lacks_own))
        if self._inbox.drain(self._pacer.pause(awaits_others=awaits_others) if is_idle else 0.0):
            seconds = self._pacer.contributed(time.monotonic(), was_idle=is_idle)
            if is_idle:
                self._inbox.linger(seconds, is_open=lambda: lifecycle.demand is Demand.NONE)
        rounds.intent = Intent.OPEN
        if self._inbox.is_empty:
            if lifecycle.is_closing and not awaits_primary():  # close may have been called meanwhile
                rounds.intent = Intent.CLOSING
            elif self._inbox.flushes:
                rounds.intent = Intent.PAUSING
        self._unsent = rounds.outbox.pending
        self._doubtful = len(rounds.ledger.assumed.disproved()) if lifecycle.is_closing else 0
        if self.backlog > self._context.limits.max_pending_rows:
            self._messages.many_unsent()

    def give_up_overdue(self) -> None:
        """Stop waiting for ranks that do not contribute to cells that have contributions of others."""
        rounds, limit = self._rounds, self._context.limits.max_pending_rows
        ledger, cells = rounds.ledger, rounds.ledger.open
        oldest = next(iter(cells.values())).born if cells else None
        overdue = self._pacer.begin_round(time.monotonic(), ledger.round, oldest)
        if overdue.new is not None:
            rounds.give_up(overdue.new, new_only=True)
        if overdue.usual is not None:
            rounds.give_up(overdue.usual, new_only=False)
        if oldest is not None and len(cells) > limit and cells.count_rows() > limit:
            self._messages.many_open()
            rounds.give_up(oldest, new_only=False)

    def answer_flushes(self, *, is_paused: bool, has_more: bool) -> None:
        """Answer this rank's flush requests, but give other ranks the chance to pause as well.

        When all ranks pause, cells with contributions of only some of them are finished. A rank without open cells
        waits a little for that if others have open cells or more to contribute.

        Args:
            is_paused: Whether all ranks have paused.
            has_more: Whether some rank has more to contribute at once.
        """
        flushes = self._inbox.flushes
        is_settled = bool(flushes) and self._rounds.settled and self._inbox.is_empty
        has_waited = self._pacer.has_flushed_alone(time.monotonic(), is_settled=is_settled)
        if is_settled and (is_paused or has_waited or not (self._rounds.ledger.open or has_more)):
            self._inbox.answer([flush for flush in flushes if is_paused or not flush.together])
