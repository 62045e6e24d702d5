"""The exchange of a unit's numbers as a state machine. Pure: no threads, clocks, sockets, torch or wandb.

Theory of operation
-------------------

Every rank of the unit has one `Rounds`, and all of them go through the same sequence of rounds. In a round, each rank
packs its contributions into two lists of numbers (`pack`). The caller reduces these over the ranks, one by sum and one
by maximum, and each rank unpacks the same reduced lists (`unpack`).

The path of one contribution: `post` puts it into the *outbox* and counts its occurrence, which determines its cell. The
*negotiation* selects the rows, or the many cells, of the next round. The *wire* format encodes them as lists of numbers
and decodes the reduced lists into cells. The *ledger* keeps the open cells, *finishing* decides which of them are
finished, and *spreads* holds back those whose spread takes one more round. `Outcome.finished` contains the values to
write, in order.

Between two rounds, in this order: if the last round found names that are not agreed on (`Outcome.needs_names`), all
ranks exchange `outbox.unknown` and `learn` the result; if many rows wait (`negotiation.many_wait`), they exchange
`negotiation.offer` and `agree` on a batch.

A rank's `Intent` is *open*, *pausing* or *closing*. It is pausing while a caller waits until everything posted so far
is finished, and may become open again. It is closing, permanently, once nothing more will be posted. A round in which
no rank is open or has anything in its outbox finishes all cells (`Outcome.paused`). If all ranks are closing and no
value awaits its spread, that round is the last one (`Outcome.closed`).

Invariants
----------

- The shared state (`snapshot`) depends on reduced numbers only. It is therefore equal on all ranks after each round,
  all ranks reach the same conclusions, and their lists have equal lengths.
- A contribution leaves the outbox only in `unpack`, when it is in a cell on all ranks. A round that was interrupted can
  be repeated with other ranks. A rank that completed a round which the others interrupted can put its contributions
  back (`put_back`).
- A contribution is in exactly one cell. A written value that changes is written again (`Finished.corrects`).
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
    INTERLEAVED,
    OVERTAKING,
    Header,
    Lists,
    batch_lists,
    header_of,
    read_spreads,
    row_lists,
)


class Intent(Enum):
    """Whether this rank will contribute more; contributions that wait are sent in any case."""

    OPEN = auto()  # it may contribute more
    PAUSING = auto()  # it waits until everything posted so far is finished
    CLOSING = auto()  # it contributes nothing more


@dataclass
class SideData:
    """The data that a rank sends and receives in addition to its numbers."""

    interleaved: bool = False  # whether its contributions come from several threads or processes, each in its order
    published: int = 0  # how often it has published something through the job's store
    most_published: float = 0.0  # the largest such count of any rank, as of the last round


class Rounds:
    """One rank's part in the rounds of its unit.

    Args:
        rank: Index of this rank in the unit; the primary is 0.
        size: Number of ranks in the unit.
        spread: Patterns of names whose spread over ranks is wanted.
        needs_primary: Returns whether a name's values can be computed only by the primary, and only if it contributes.
        remembered: Number of finished cells kept for late contributions.
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
        self._gives_up = (NOTHING, NOTHING)  # up to these rounds: cells of new names, all cells
        self._contributed: list[Contributed] = []  # by this rank in the last round

    # Contributions of this rank

    def post(self, values: Mapping[str, Totals], step: int | None, calls: int = 0) -> list[Key]:
        """Put the values of one `log` call into the outbox.

        Args:
            values: This rank's contribution by name.
            step: The step that the user gave, or `None`.
            calls: Number of earlier `log` calls on this rank.

        Returns:
            The cells of the values, in the order of `values`.
        """
        return self.outbox.post(values, step, calls)

    def give_up(self, born: int, *, new_only: bool) -> None:
        """Announce in the next round that this rank has waited long enough for others.

        Args:
            born: Cells opened in this round or earlier are to be finished without the missing ranks.
            new_only: Whether to include only cells of names that were never finished before.
        """
        new, every = self._gives_up
        self._gives_up = (max(new, born), every) if new_only else (new, max(every, born))

    def put_back(self) -> None:
        """Put the last round's contributions back: the others interrupted that round and continue from before it."""
        self.outbox.put_back(self._contributed)
        self._contributed = []

    # A round

    def pack(self, *, regroup: bool = False) -> Lists:
        """Return this rank's lists for the next round: one to reduce by sum, one to reduce by maximum.

        Args:
            regroup: Whether to request a new generation after this round.
        """
        waiting, negotiation, names = self.outbox.waiting, self.negotiation, self.ledger.names
        header = Header(
            busy=float(self.intent is not Intent.CLOSING or bool(waiting or self.spreads.awaiting)),
            give_up_new=self._gives_up[0],
            give_up_all=self._gives_up[1],
            more=float(bool(waiting)),  # even if it is another rank's turn
            regroup=float(regroup),
            contributing=float(self.intent is Intent.OPEN or bool(waiting)),
            disorder=INTERLEAVED if self.side_data.interleaved else OVERTAKING * bool(self.outbox.overtaking),
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
        if rows and negotiation.is_under_way and not self.outbox.is_oldest(*rows[0]):
            header = header._replace(disorder=max(header.disorder, OVERTAKING))
        return row_lists(header, names, rows, negotiation.room(names), self.spreads)

    def unpack(self, sums: Sequence[float], maxima: Sequence[float]) -> Outcome:
        """Apply the result of a round.

        Args:
            sums: The sum of the ranks' first lists.
            maxima: The elementwise maximum of the ranks' second lists.
        """
        header, names, negotiation = header_of(maxima), self.ledger.names, self.negotiation
        self.ledger.round += 1
        self.side_data.most_published = header.published
        self._contributed = []
        batch, negotiation.batch = negotiation.batch, None
        written = self._values_with_spread(sums, maxima)
        regroup = header.regroup > 0
        self.finishing.is_interleaved = self.finishing.is_interleaved or header.disorder >= INTERLEAVED
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
        own, is_split = [key for key, *_ in self._contributed], negotiation.is_split
        finished, late, lost = self.finishing.conclude(received, own, header, is_split=is_split)
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

    def _values_with_spread(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[Finished, ...]:
        """Return the values finished in the last round, with their spread."""
        written, self.spreads.awaiting = tuple(self.spreads.awaiting), []
        read_spreads(written, sums, maxima)
        return written

    def _remove_contributed(self) -> None:
        """Remove this rank's contributions from the outbox; keep the numbers whose spread is wanted."""
        names = self.ledger.names
        self.outbox.remove(self._contributed)
        for key, totals, _ in self._contributed if names.spread else ():
            if names[key.name].has_spread and totals.number:
                self.spreads.keep(key, totals)
        self.spreads.forget(max(self._remembered, 2 * len(names)))

    # Between rounds, on all ranks

    def learn(self, received: Iterable[Iterable[str]]) -> None:
        """Agree on the names that the ranks have sent, given in rank order."""
        self.ledger.names.learn(name for names in received for name in names)

    def resize(self, size: int, absent: int, *, doubts: bool = False) -> None:
        """Continue with other ranks. Cells to which all of them have contributed are finished in the next round.

        Args:
            size: Number of participating ranks.
            absent: Number of ranks that should participate, but do not.
            doubts: Whether the absent ranks are alive but no longer waited for, and may log names they never logged.
        """
        self.ledger.resize(size, absent, doubts=doubts)
        self.spreads.resize(size)
        self.finishing.recheck = True
        self.finishing.reflags = absent > 0
        self.negotiation.begin_anew()

    def recount(self, contributed: Iterable[Counted], held: Iterable[Counted]) -> None:
        """Count the contributors of open cells that are gone, and drop spreads that can no longer be computed.

        A spread needs all contributors, because each of them sends its own deviation from the mean.

        Args:
            contributed: `ledger.contributed()` of the participating ranks; each list with the number of ranks that
                sent it.
            held: `spreads.held()` of the participating ranks, in the same form.
        """
        self.spreads.recount(held)
        self.ledger.recount(contributed)

    def snapshot(self) -> dict[str, Any]:
        """Return the shared state as JSON values, from which a joining rank can continue with the others."""
        return {
            **self.ledger.snapshot(),
            **self.negotiation.snapshot(),
            "awaiting": [value.as_list() for value in self.spreads.awaiting],
            "interleaved": self.finishing.is_interleaved,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over the shared state. This rank's outbox is kept."""
        self.ledger.restore(snapshot)
        self.negotiation.restore(snapshot)
        self.spreads.awaiting = [Finished.from_list(value) for value in snapshot["awaiting"]]
        self.finishing.is_interleaved = bool(snapshot["interleaved"])

    # Remaining work

    @property
    def busy(self) -> bool:
        """Whether another round is needed: for contributions, open cells, or values that await their spread."""
        reflags = self.finishing.reflags and self.ledger.assumed
        return bool(self.outbox.waiting or self.ledger.open or self.spreads.awaiting or reflags)

    @property
    def settled(self) -> bool:
        """Whether everything that this rank posted is finished, and no value awaits its spread."""
        return not (self.outbox.waiting or self.ledger.own or self.spreads.awaiting)
