"""The exchange of a unit's numbers as a state machine. Pure: no threads, clocks, sockets, torch or wandb.

Theory of operation
-------------------

Every rank of the unit has one `Rounds`. All of them go through the same sequence of rounds. In a round each packs what
it contributes into two lists of numbers (`pack`); elsewhere these are reduced over the ranks, one by sum and one by
maximum; and each takes the same reduced lists (`take`).

One contribution goes this way: `post` puts it into the *outbox* and counts its occurrence, which gives its cell. The
*negotiation* finds the rows that the next round is for, or the many cells. The *wire* format makes lists of numbers of
what is due, and cells of the reduced ones. The *ledger* keeps the open cells; *finishing* decides which are finished;
*spreads* holds back those whose spread takes one more round. `Outcome.finished` has what is to be written, in its
order.

Between two rounds, in this order: if the last one found names that are not agreed on (`Outcome.needs_names`), all ranks
exchange `outbox.unknown` and `learn` them; if many rows wait (`negotiation.many_wait`), they exchange
`negotiation.offer` and `agree` on a batch.

A rank's `Intent` is *open*, *pausing* or *closing*. It is pausing as long as somebody waits until all is finished that
was posted so far, and may be open again; it is closing for good once nothing more will be posted. In a round in which
no rank is open, or has anything in its outbox, all cells are finished (`Outcome.paused`); if all are closing and no
value awaits its spread, that round is the last one (`Outcome.closed`).

Invariants
----------

- What the ranks know together (`snapshot`) changes by reduced numbers alone. So it is equal on all ranks after each
  round, all draw the same conclusions, and the lengths of their lists agree.
- A contribution leaves the outbox only in `take`, once it is in a cell on all ranks: one round that is broken off can
  be repeated with other ranks, or taken back by a rank that came to its end while the others broke it off
  (`take_back`).
- A contribution is in exactly one cell. A value that was written and changes is written again (`Finished.corrects`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.cells import NOTHING, Contributed, Counted, Finished, Key, Outcome
from dist_wandb.exchange.protocol.finishing import Finishing
from dist_wandb.exchange.protocol.ledger import Ledger
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.negotiation import Negotiation
from dist_wandb.exchange.protocol.outbox import Outbox
from dist_wandb.exchange.protocol.spreads import Spreads
from dist_wandb.exchange.protocol.wire import (
    Header,
    Lists,
    batch_lists,
    header_of,
    read_spreads,
    row_lists,
)


class Intent(Enum):
    """What this rank means to do; its contributions that wait are sent in any case."""

    OPEN = auto()  # may contribute more
    PAUSING = auto()  # waits until all is finished that was posted so far
    CLOSING = auto()  # contributes nothing more


@dataclass
class SideData:
    """What a rank says beside its numbers, and hears.

    Args:
        interleaved: Whether its contributions come from several threads or processes, each in its order.
        published: How often it has published something through the job's store.
        most_published: The most that any rank had published, by the last round.
    """

    interleaved: bool = False
    published: int = 0
    most_published: float = 0.0


class Rounds:
    """One rank's part in the rounds of its unit.

    Args:
        rank: Index of this rank in the unit; the primary is 0.
        size: Number of ranks in the unit.
        spread: Patterns of names whose spread over ranks is wanted.
        needs_primary: Whether only the primary can compute a name's values, and not without contributing itself.
        remembered: How many finished cells are kept for contributions that come late.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        spread: Sequence[str] = (),
        needs_primary: Callable[[str], bool] = lambda _: False,
        remembered: int = 32_768,
    ) -> None:
        self.intent = Intent.OPEN
        self.side_data: SideData = SideData()
        self.outbox: Outbox = Outbox(rank, remembered)
        self.ledger: Ledger = Ledger(size, Names(spread), remembered)
        self.finishing: Finishing = Finishing(self.ledger, needs_primary)
        self.spreads: Spreads = Spreads(rank)
        self.negotiation: Negotiation = Negotiation()
        self._remembered = remembered
        self._gives_up = (NOTHING, NOTHING)  # up to which rounds: cells of new names, and all cells
        self._contributed: list[Contributed] = []  # by this rank in the last round

    # What this rank contributes

    def post(self, values: Mapping[str, Totals], step: int | None, calls: int = 0) -> list[Key]:
        """Put what this rank logged in one call into the outbox.

        Args:
            values: This rank's contribution by name.
            step: The step that the user gave, or `None`.
            calls: How often this rank had called `log` before.

        Returns:
            The cells that the values go into, in the order of `values`.
        """
        return self.outbox.post(values, step, calls)

    def give_up(self, born: int, *, new_only: bool) -> None:
        """Send in the next round that this rank has waited long enough for others.

        Args:
            born: Cells opened in this round or before are to be finished with those who are there.
            new_only: Whether only those of names that were never finished before are meant.
        """
        new, every = self._gives_up
        self._gives_up = (max(new, born), every) if new_only else (new, max(every, born))

    def take_back(self) -> None:
        """Contribute the last round's contributions again: the others broke it off, and go on from before it."""
        self.outbox.put_back(self._contributed)
        self._contributed = []

    # A round

    def pack(self, *, regroup: bool = False) -> Lists:
        """This rank's lists for the next round: one to be summed over ranks, one of which the maximum is taken.

        Args:
            regroup: Whether the ranks that take part should be agreed on anew after this round.
        """
        waiting, negotiation, names = self.outbox.waiting, self.negotiation, self.ledger.names
        header = Header(
            busy=float(self.intent is not Intent.CLOSING or bool(waiting or self.spreads.awaiting)),
            give_up_new=self._gives_up[0],
            give_up_all=self._gives_up[1],
            more=float(bool(waiting)),  # also where it is another rank's turn
            regroup=float(regroup),
            contributing=float(self.intent is Intent.OPEN or bool(waiting)),
            interleaved=float(self.side_data.interleaved),
            published=float(self.side_data.published),
        )
        if negotiation.batch is not None:
            left = self.outbox.pending - negotiation.rows_offered()
            header = header._replace(more=float(left > 0), backlog=left, unknown=float(negotiation.needs_names))
            return batch_lists(header, negotiation.batch, negotiation.offered, self.spreads)
        rows = negotiation.propose(self.outbox, names)
        header = header._replace(
            more=float(self.outbox.contributions > sum(len(due) for _, due in rows)),
            backlog=max(0.0, self.outbox.pending - len(rows)),
            unknown=float(negotiation.needs_names),
        )
        return row_lists(header, names, rows, negotiation.room(names), self.spreads)

    def take(self, sums: Sequence[float], maxima: Sequence[float]) -> Outcome:
        """Draw the conclusions of a round.

        Args:
            sums: The first lists of all ranks, summed.
            maxima: The largest of the second lists of all ranks, number by number.
        """
        header, names, negotiation = header_of(maxima), self.ledger.names, self.negotiation
        self.ledger.round += 1
        self.side_data.most_published = header.published
        self._contributed = []
        batch, negotiation.batch = negotiation.batch, None
        written = self._take_spreads(sums, maxima)
        regroup = header.regroup > 0
        self.finishing.is_interleaved = self.finishing.is_interleaved or header.interleaved > 0
        needs_names = header.unknown > 0
        if needs_names and batch is None:
            return Outcome(written, needs_names=True, more=True, regroup=regroup)
        new, every = self._gives_up
        self._gives_up = (
            new if new > header.give_up_new else NOTHING,
            every if every > header.give_up_all else NOTHING,
        )
        if batch is None:
            received, self._contributed = negotiation.received(names, sums, maxima)
        else:
            received, self._contributed = negotiation.received_in(batch, sums, maxima)
        self._remove_contributed()
        finished, late, lost = self.finishing.conclude(received, [key for key, *_ in self._contributed], header)
        closed, paused = header.busy == 0 and not regroup, header.contributing == 0
        awaits = any(value.spread for value in finished)
        self.spreads.awaiting += finished if awaits else ()
        negotiation.look_ahead(header.backlog, names)
        more = header.more > 0 or negotiation.is_under_way or needs_names or negotiation.many_wait
        if awaits:
            more, closed, paused = more or closed, False, False
        else:
            written, more = written + finished, more or self.finishing.recheck
        return Outcome(written, needs_names, closed, paused, more, regroup, late, lost, self.finishing.silent)

    def _take_spreads(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[Finished, ...]:
        """Values finished in the last round, with their spread."""
        written, self.spreads.awaiting = tuple(self.spreads.awaiting), []
        read_spreads(written, sums, maxima)
        return written

    def _remove_contributed(self) -> None:
        """Take from the outbox what this rank contributed; remember the numbers whose spread is wanted."""
        names = self.ledger.names
        self.outbox.remove(self._contributed)
        for key, totals, _ in self._contributed if names.spread else ():
            if names[key.name].has_spread and totals.number:
                self.spreads.keep(key, totals)
        self.spreads.forget(max(self._remembered, 2 * len(names)))

    # What all ranks do alike, between rounds

    def learn(self, received: Iterable[Iterable[str]]) -> None:
        """Agree on the names that the ranks have sent, given in the order of ranks."""
        self.ledger.names.learn(name for names in received for name in names)

    def resize(self, size: int, absent: int, *, doubts: bool = False) -> None:
        """Go on with other ranks. Cells to which all of them have contributed are finished in the next round.

        Args:
            size: Number of ranks that take part.
            absent: Number of ranks that should take part, but do not.
            doubts: Whether these are there, but not waited for any more, so that they may log what they never did.
        """
        self.ledger.resize(size, absent, doubts=doubts)
        self.spreads.resize(size)
        self.finishing.recheck = True
        self.finishing.reflags = absent > 0
        self.negotiation.begin_anew()

    def recount(self, contributed: Iterable[Counted], held: Iterable[Counted]) -> None:
        """Count, in open cells, the contributors that are gone apart from those that take part.

        A spread is known only if all contributors take part: each of them sends how far it is from the mean.

        Args:
            contributed: The `ledger.contributed()` of ranks that take part, each with how many gave the same.
            held: Likewise of `spreads.held()`.
        """
        self.spreads.recount(held)
        self.ledger.recount(contributed)

    def snapshot(self) -> dict[str, Any]:
        """What the ranks know together, as JSON can hold it: with it a rank that joins can go on with them."""
        awaiting = [value.as_list() for value in self.spreads.awaiting]
        return {
            **self.ledger.snapshot(),
            **self.negotiation.snapshot(),
            "awaiting": awaiting,
            "interleaved": self.finishing.is_interleaved,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what the ranks know together. What this rank has yet to contribute is kept."""
        self.ledger.restore(snapshot)
        self.negotiation.restore(snapshot)
        self.spreads.awaiting = [Finished.from_list(value) for value in snapshot["awaiting"]]
        self.finishing.is_interleaved = bool(snapshot["interleaved"])

    # Whether there is more to do

    @property
    def busy(self) -> bool:
        """Whether there is reason for another round: contributions, open cells, or values that await their spread."""
        reflags = self.finishing.reflags and self.ledger.assumed
        return bool(self.outbox.waiting or self.ledger.open or self.spreads.awaiting or reflags)

    @property
    def settled(self) -> bool:
        """Whether all that this rank ever posted is finished, and nothing waits for its spread."""
        return not (self.outbox.waiting or self.ledger.own or self.spreads.awaiting)
