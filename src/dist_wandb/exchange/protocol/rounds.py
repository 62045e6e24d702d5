"""The exchange of a unit's rows as a state machine. Pure: no threads, clocks, sockets, torch or wandb.

Theory of operation
-------------------

Every rank of the unit has one `Rounds`, and all of them go through the same sequence of rounds. A round has two steps.
First each rank tells all others which calls of `log` it offers (`offer`), and all ranks choose the same ones (`plan`).
Then the numbers of these calls are combined: each rank packs its part into a list of sums and a list of maxima
(`Plan.pack`), the caller reduces these over the ranks, and each rank unpacks the same reduced lists (`unpack`).
`Outcome.rows` contains the rows to write, in order.

The path of one call: it is posted in the *outbox*. Usually all ranks offer the same calls; those that are complete
are written without any state (`plan`). What remains goes into the *table* (`table`), in which rows wait for ranks.
A call stays in the outbox until every rank that usually logs one of its names offers its part, or it is old: so what
belongs together is taken together, and the table is empty in normal life.

A rank's `Intent` is *open*, *pausing* or *closing*. It is pausing while a caller waits until everything posted so far
is finished, and may become open again. It is closing, permanently, once nothing more will be posted. A round in which
no rank is open or has anything left finishes all rows (`Outcome.paused`). If all ranks are closing, it is the last one
(`Outcome.closed`). A rank that has failed pauses until it leaves; rows that it usually has a part in lack it.

Invariants
----------

- The shared state (`snapshot`) depends on offers and reduced numbers only. It is therefore equal on all ranks after
  each round, all ranks reach the same conclusions, and their lists have equal lengths.
- A call leaves the outbox only in `unpack`, when it is in the table of all ranks. A round that was interrupted can be
  repeated with other ranks. A rank that completed a round which the others interrupted can put its calls back
  (`put_back`).
- A value is in exactly one cell. A written row that changes is written again, as a whole (`Row.corrects`).
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

from dist_wandb.exchange.protocol.calls import MOST_VALUES, Block, Call, Intent, Key, Offer, Outbox, blocks_of
from dist_wandb.exchange.protocol.contributors import NEVER, Contributors, Patience, Progress, Ranks
from dist_wandb.exchange.protocol.lanes import Number
from dist_wandb.exchange.protocol.memory import Cell, Known, Memory, Row
from dist_wandb.exchange.protocol.plan import Plan
from dist_wandb.exchange.protocol.table import Conclusion, Table

Offers = Mapping[bytes, Ranks]
"""What the ranks have offered: each different offer once, with the ranks that have made it."""

_MOST_NEW = 1024  # calls whose new names a rank announces at once
_MOST_UNWRITTEN = 100  # names of values that only the primary writes, which a rank tells at its end


@dataclass
class SideData:
    """The data that a rank sends and receives in addition to its numbers."""

    interleaved: bool = False  # whether its calls come from several threads or processes, each in its order
    published: int = 0  # how often it has published something through the job's store
    all_published: int = 0  # how often all ranks together have, as of the last round
    axes: Collection[str] = ()  # names that this rank knows to be x axes of the user
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of names that some rank has logged nested
    unwritten: Collection[str] = ()  # names that this rank has logged of values that only the primary writes


@dataclass(frozen=True)
class Outcome:
    """The result of a round; the same on all ranks, except for what concerns this rank only."""

    rows: tuple[Row, ...] = ()  # to write, in this order
    closed: bool = False  # all ranks are closing and nothing is left, also to write: no further round takes place
    paused: bool = False  # all ranks have paused, and all their calls are finished
    more: bool = False  # some rank has more to contribute at once: the next round need not wait for anything
    awaits: bool = False  # calls or rows of some rank wait for others
    crowded: bool = False  # more than `most_open` rows wait: the oldest are written without ranks they wait for
    regroup: bool = False  # a rank requested a new generation before the next round
    taken: int = field(default=0, compare=False)  # how many calls of this rank were taken
    late: tuple[Key, ...] = field(default=(), compare=False)  # cells that it gave after their row was written
    lost: tuple[Key, ...] = field(default=(), compare=False)  # cells that it gave after their row was forgotten
    silent: tuple[Key, ...] = field(default=(), compare=False)  # cells that others gave up to wait for it
    differing: tuple[str, ...] = ()  # names of x axes whose values differ between the ranks of a row
    uneven: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # at the end: `Table.uneven`


def _without_numbers(step: int | None, x: int, own: Sequence[Any], serial: int = 0) -> Row:
    return Row((), (), step, x, ([], []), {}, (), own=own, serial=serial)


class Rounds:
    """One rank's part in the rounds of its unit.

    `needs_primary` returns whether a name's values can be computed only by the primary, and only if it contributes.
    """

    def __init__(
        self,
        rank: int,  # index in the unit; the primary is 0
        size: int,  # number of ranks in the unit
        *,
        needs_primary: Callable[[str], bool] = lambda _: False,
        remembered: int = 32_768,  # cells of written rows that are kept for late contributions
        most_open: int = 10_000,  # rows that may wait for ranks
        hold: float = 0.5,  # how long a call waits for other ranks to offer their part, in seconds
        hold_of_part: float = 20.0,  # how long a call is not offered that the script may continue, in seconds
    ) -> None:
        self.intent = Intent.OPEN
        # up to these rounds it gives up the cells of new names, and all cells, that were opened then
        self.gives_up: tuple[int, int] = NEVER, NEVER
        self.side_data: SideData = SideData()
        self.outbox: Outbox = Outbox(remembered)
        self.table: Table = Table(size, remembered)
        self._rank = rank
        self._hold = hold
        self._hold_of_part = hold_of_part
        self._patience = Patience(most_open, needs_primary)
        # What this rank alone keeps for the rows of its calls, until these are written: by the first cell of each call,
        # also of those that were joined.
        self._kept: dict[Key, list[Any]] = {}

    # Calls of this rank, which are posted in `outbox`

    def put_back(self) -> None:
        # the others interrupted the last round, and continue from before it
        for key in chain(*(call.cells() for call in self.outbox.last)):
            self._kept.pop(key, None)
        self.outbox.waiting.extendleft(reversed(self.outbox.last))
        self.outbox.last = ()

    # A round

    def offer(self, now: float, *, regroup: bool = False) -> bytes:
        """Return what this rank tells the others before the round; `regroup` requests a new generation after it."""
        table, outbox, side = self.table, self.outbox, self.side_data
        calls, values, known = list[Call](), 0, set[int]()
        for call in outbox.waiting:
            if id(call.names) not in known:
                if not table.names.keys() >= {*call.names}:
                    break
                known.add(id(call.names))
            calls.append(call)
            values += len(call.names) or 1
            if values >= MOST_VALUES:
                break
        is_open, rest = self.intent is Intent.OPEN, len(outbox.waiting) - len(calls)
        if calls and not rest and is_open and outbox.may_grow and now - calls[-1].at < self._hold_of_part:
            calls.pop()
        outbox.offered = calls
        is_last = self.intent is Intent.CLOSING and self._rank not in table.ranks.closed and not rest
        unknown = [name for name in outbox.names(_MOST_NEW) if name not in table.names] if rest else ()
        return Offer(
            blocks_of(calls),
            bisect_right(calls, now - self._hold, key=attrgetter("at")) if is_open else len(calls),
            rest,
            self.intent,
            *(self.gives_up if table.open else (NEVER, NEVER)),
            regroup,
            side.interleaved and self._rank not in table.ranks.interleaved,
            side.published,
            [side.paths.get(name, (name,)) for name in unknown] if unknown else (),
            sorted({*side.axes} - table.axes.keys()),
            {**dict.fromkeys(sorted(side.unwritten)[:_MOST_UNWRITTEN], 0), **outbox.without_step} if is_last else {},
        ).encoded(table.names)

    def plan(self, offers: Offers) -> Plan:
        """Choose the calls of the round, given what all ranks offer; raise ValueError for anything but offers.

        Changes no shared state.
        """
        names, known = list(self.table.names), dict[bytes, list[Block]]()
        data_of = dict(zip(offers.values(), offers, strict=True))
        found: dict[Ranks, Offer] = {}
        for ranks in sorted(data_of, key=min):
            found[ranks] = Offer.decoded(data_of[ranks], names, known)
        return Plan(self.table, found, self._rank, self.outbox.offered)

    def unpack(self, plan: Plan, sums: Sequence[float], maxima: Sequence[float]) -> Outcome:
        """Apply the reduced lists of a round, which are empty if it had no numbers."""
        table, waiting, taken = self.table, plan.waiting, plan.party.taken if plan.party else 0
        table.round += 1
        rows, places = plan.apply(sums, maxima, self.side_data.paths)
        calls, own_rows, late = self.outbox.take(taken), list[tuple[int, Row]](), list[Key]()
        first = table.serial - len(plan.chosen) + 1  # serial of the first of these calls
        for place, one in enumerate(plan.chosen):
            if one.party is plan.party:
                late += [key for key in one.cells if table.cells[key].shown is not None]
                for before, own in calls[one.number].own:
                    if behind := [key for key, at in one.cells.items() if at >= before] or [*one.cells][-1:]:
                        self._kept.setdefault(behind[0], []).append(own)
                    else:
                        own_rows.append((place, _without_numbers(one.call.step, one.call.x, [own], first + place)))
        each: Any = Offer._make(zip(*plan.offers.values(), strict=True))  # the fields of all offers
        takes_all, is_crowded = not waiting, len(table.open) > self._patience.most_open
        patience = self._patience._replace(
            of_new=max(each.give_up_new),
            of_all=max(each.give_up_all),
            everything=takes_all and Intent.OPEN not in each.intent,
            behind=any(each.more),
        )
        if not takes_all:  # calls of before a rank was lost may follow
            table.ranks.lost = {rank: at + (at == table.round) for rank, at in table.ranks.lost.items()}
        if Intent.CLOSING in each.intent:
            table.leave(plan.having(Intent.CLOSING) - waiting)
        if Intent.FAILING in each.intent:
            table.ranks.failed = plan.having(Intent.FAILING)
        conclusion = Conclusion(table, plan.touched, patience, self._rank)
        finished = list(conclusion.rows()) if table.open else []
        table.memory.forget(table.names)
        if finished or own_rows or self._kept:
            earlier = self._complete(row for owner, row in finished if owner not in places)
            later = own_rows + [(places[owner], row) for owner, row in finished if owner in places]
            rows += self._complete(row for _, row in sorted(later, key=itemgetter(0)))
            for key in [key for key in self._kept if key not in table.cells]:  # which is not written with it any more
                x = -1 if key.step is None else key.step
                earlier.append(_without_numbers(key.step, x, self._kept.pop(key)))
            rows[:0] = earlier
        done, regroup = patience.everything, any(each.regroup)
        # not yet if there were rows: a rank may now have to wait for the one that writes them
        is_over = done and not finished and not any(each.blocks)
        is_closed = is_over and not regroup and table.ranks.closed >= table.ranks.members
        self.side_data.all_published = sum(len(ranks) * offer.published for ranks, offer in plan.offers.items())
        return Outcome(
            tuple(rows),
            closed=is_closed,
            paused=done,
            more=patience.behind or any(each.new_names) or (done and not is_closed),
            awaits=bool(table.open) or not takes_all,
            crowded=is_crowded,
            regroup=regroup,
            taken=taken,
            late=tuple(late),
            lost=tuple(conclusion.too_late),
            silent=tuple(conclusion.gave_up),
            differing=tuple(plan.differing),
            uneven=table.uneven() if is_closed else {},
        )

    def _complete(self, rows: Iterable[Row]) -> list[Row]:
        """Return rows of the table with what this rank keeps for them."""
        found = []
        for row in rows:
            own = [one for key in row.cells() for one in self._kept.pop(key, ())] if self._kept else []
            found.append(row._replace(own=own) if own else row)
        return found

    # Between rounds, on all ranks

    def resize(self, members: Iterable[int], lost: Iterable[int]) -> None:
        """Continue with these ranks, without the `lost` ones. The next round finishes rows that all members are in."""
        self.table.resize(frozenset(members), frozenset(lost))

    def snapshot(self) -> dict[str, Any]:
        # as JSON values, for a joining rank: plain objects, by their attributes
        return {"table": encoded(self.table)}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.table = decoded(snapshot["table"])

    # Remaining work

    @property
    def busy(self) -> bool:
        return bool(self.outbox.waiting or self.table.open)

    @property
    def settled(self) -> bool:
        return not self.outbox.waiting and not any(True for _ in self.own_open())

    def own_open(self) -> Iterable[Key]:
        """Yield the cells of open rows to which this rank has contributed."""
        return (key for key in self.table.unwritten() if self._rank in self.table.cells[key].ranks)


_TUPLES = {kind.__name__: kind for kind in (Key, Known, Number, Row)}
_OBJECTS = {kind.__name__: kind for kind in (Cell, Contributors, Memory, Progress, Table)}


def encoded(value: Any) -> Any:
    """Return a value as JSON values: a list with the name of its type and its items, or an object of its attributes."""
    kind = type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return [kind, base64.b64encode(value).decode()]
    if isinstance(value, frozenset):
        return [kind, *sorted(value)]
    if isinstance(value, (list, tuple)):
        return [kind, *map(encoded, value)]
    if isinstance(value, dict):
        return [kind, *([encoded(key), encoded(item)] for key, item in value.items())]
    names = getattr(value, "__slots__", None) or vars(value)
    return {"": kind, **{name: encoded(getattr(value, name)) for name in names}}


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        made = object.__new__(_OBJECTS[value[""]])
        for name, item in value.items():
            if name:
                setattr(made, name, decoded(item))
        return made
    if not isinstance(value, list):
        return value
    kind, *items = value
    if kind == "bytes":
        return base64.b64decode(items[0])
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in items}
    if kind in _TUPLES:
        return _TUPLES[kind](*map(decoded, items))
    return {"list": list, "tuple": tuple, "frozenset": frozenset}[kind](map(decoded, items))
