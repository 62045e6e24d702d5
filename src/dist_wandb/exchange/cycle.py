"""One round of an exchange, the same for ranks together and for one rank alone.

A round reduces the two lists that the members pack, and takes the result. Its consequences are the same on all members:
they exchange names, exchange metric states, tables and images of finished cells, and write finished values. Work that
remains when the exchange breaks (`_names_due`, `_due`) is done by the next generation. That begins with a greeting in
which the members exchange what remains.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dist_wandb.exchange.context import Context
from dist_wandb.exchange.membership.generations import Checkpoint
from dist_wandb.exchange.output import Output
from dist_wandb.exchange.protocol.cells import Finished, Key, Outcome
from dist_wandb.exchange.protocol.pacing import Pacer
from dist_wandb.exchange.protocol.rounds import Intent, Rounds
from dist_wandb.exchange.protocol.series import is_attached
from dist_wandb.exchange.transport.group import Alone, Group


class Cycle:
    """Carries out one rank's rounds over a group.

    Attributes:
        group: The participating members; `None` between two generations.
        has_more: Whether some rank has more to contribute at once, as of the last round.
    """

    def __init__(self, context: Context, rounds: Rounds, output: Output, pacer: Pacer) -> None:
        self.group: Group | None = None
        self.has_more: bool = False
        self._rows = context.rows
        self._unit = context.unit
        self._rounds = rounds
        self._output = output
        self._pacer = pacer  # does not count the time that attachments take
        self._result: tuple[list[float], list[float]] | None = None  # of the last round
        self._due: tuple[Finished, ...] = ()  # finished, but not written yet
        self._names_due = False

    def begin(self, group: Group, learn_ranks: Callable[[dict[int, int]], None]) -> None:
        """Begin a generation: do the work that remained on some members when the last one broke.

        Args:
            group: Its members.
            learn_ranks: Called with the index in the job, by index in the unit, of members for which
                `Unit.global_rank_of` is wrong.

        Raises:
            BrokenError: The exchange failed.
        """
        self.group = group
        rounds = self._rounds
        ledger = rounds.ledger
        state = [ledger.round, list(ledger.names)]
        own = {"state": state, "names": self._names_due, "due": _cells_of(self._due)}
        own["contributed"], own["held"] = ledger.contributed(), rounds.spreads.held()
        unit = self._unit  # its ranks are usually known, so that greetings of thousands of members are equal
        own["rank"] = None if unit.global_rank_of(unit.index) == unit.global_rank else [unit.index, unit.global_rank]
        counted = [(json.loads(text), count) for text, count in group.tally(json.dumps(own).encode()).items()]
        greetings = [greeting for greeting, _ in counted]
        if any(greeting["state"] != state for greeting in greetings):  # gloo would abort the process
            raise RuntimeError(f"the members disagree at the beginning of a generation: {greetings}")
        rounds.recount(*([(greeting[kind], count) for greeting, count in counted] for kind in ("contributed", "held")))
        learn_ranks(dict(greeting["rank"] for greeting in greetings if greeting["rank"]))
        if any(greeting["names"] for greeting in greetings):
            self._exchange_names(group)
        due = {Key.of(key): None for greeting in greetings for key in greeting["due"]}
        self._exchange_attachments(group, due)
        self._write_due()

    def round(self, *, regroup: bool = False) -> Outcome:
        """Take part in one round, and do the work that follows from it.

        Args:
            regroup: Whether to request a new generation after it.

        Raises:
            BrokenError: The exchange failed.
        """
        group = self.group
        if group is None:
            raise RuntimeError("a round needs a group")
        rounds, names = self._rounds, self._rounds.ledger.names
        if rounds.negotiation.many_wait:
            offers = group.tally(json.dumps(rounds.negotiation.offer(rounds.outbox, names)).encode())
            rounds.negotiation.agree([json.loads(offer) for offer in offers], names)
        result = group.reduce(*rounds.pack(regroup=regroup))
        self._rows.held.attachments.passed()
        outcome = self._unpack(*result)
        if outcome.needs_names:
            self._exchange_names(group)
        self._exchange_attachments(group, _cells_of(self._due))
        self._write_due()
        self.has_more = outcome.more
        return outcome

    def _unpack(self, sums: list[float], maxima: list[float]) -> Outcome:
        outcome = self._rounds.unpack(sums, maxima)
        self._result = sums, maxima
        self._due += outcome.finished
        self._names_due = outcome.needs_names
        return outcome

    def _exchange_names(self, group: Group) -> None:
        names = group.tally(json.dumps(self._rounds.outbox.unknown(self._rounds.ledger.names)).encode())
        self._rounds.learn([json.loads(unknown) for unknown in names])
        self._names_due = False
        self._rows.posting.settle(self._rounds)

    def _exchange_attachments(self, group: Group, due: Iterable[Key]) -> None:
        for attachment, keys in self._rows.held.attachments.due(due, has_primary=self._output.has_primary):
            began = time.monotonic()
            attachment.exchange(keys, group)
            self._pacer.exclude(time.monotonic() - began)  # it is long on a slow network

    def _write_due(self) -> None:
        due, self._due = self._due, ()
        self._output.write(due)

    def is_awaited(self) -> bool:
        """Return whether the others will request more than numbers of this rank: states, tables or spreads."""
        ledger, spreads = self._rounds.ledger, self._rounds.spreads
        names = spreads.awaited_of_own() | {key.name for key in ledger.own}
        return any(is_attached(name) or ledger.names.has_spread(name) for name in names)

    # Between generations

    def checkpoint(self) -> Checkpoint:
        """Return this rank's state."""
        return Checkpoint(self._rounds.ledger.round, list(self._rounds.ledger.names), self._result)

    def catch_up(self, checkpoint: Checkpoint) -> bool:
        """Catch up with the others, who are at most one round, or some names, ahead.

        Returns:
            Whether all ranks were done then.
        """
        is_closed = False
        if checkpoint.round == self._rounds.ledger.round + 1 and checkpoint.result is not None:
            sums, maxima = checkpoint.result
            is_closed = self._unpack(list(sums), list(maxima)).closed
        if checkpoint.round == self._rounds.ledger.round:
            self._rounds.learn([checkpoint.names])
        return is_closed

    def snapshot(self) -> dict[str, Any]:
        """Return the shared state of the members, for a joining rank."""
        return {**self._rounds.snapshot(), "unwritten": self._output.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the others' state, including values that they finished while the primary was away."""
        self._rounds.restore(state)
        self._due += self._output.restore(state["unwritten"])

    def close(self) -> None:
        """Detach from the group."""
        if self.group is not None:
            self.group.close()
            self.group = None

    # Alone

    def continue_alone(self) -> None:
        """Switch to rounds of this rank only."""
        self.close()
        self.group = Alone()
        self.has_more = False

    def write_all(self) -> None:
        """Finish and write everything that this rank has; for a rank that is alone."""
        self._write_due()
        rounds = self._rounds
        while rounds.busy or self._names_due:
            outcome = self.round()
            if outcome.closed or not (outcome.more or rounds.outbox.pending or rounds.intent is Intent.CLOSING):
                break
        self.has_more = False


def _cells_of(values: Iterable[Finished]) -> list[Key]:
    """Return the cells of finished values, except of those that are only flagged."""
    return [value.key for value in values if value.totals.contributors]
