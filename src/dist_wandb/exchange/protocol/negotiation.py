"""Which rows the next round is for. Pure, and equal on all ranks: it changes by reduced numbers alone.

States:

- *One row* (the usual one): each rank proposes the position of the oldest row that it has. If all propose the same, the
  round is for that one. Else nothing is received, and `focus` holds what the next proposals must begin with: the
  smallest `counted`, then the smallest step. Each round without an agreement makes it longer, so the third one agrees.
  Names for which ranks contribute different occurrences at that position take `turns`: the smallest one is next.
- *Many rows* (`many_wait`): eight rows or more wait on some rank. Before the round each rank tells in which cells it
  has something (`offer`); all make the same list of these (`agree`), and the round is for the cells of this `batch`. It
  ends what `focus` and `turns` were looking for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.batches import Row, Run, Slot, decoded, encoded, merged
from dist_wandb.exchange.protocol.cells import Contributed, Key, Place, Received
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.outbox import Outbox
from dist_wandb.exchange.protocol.wire import Header, read_batch, read_row

MANY = 8  # rows that wait on some rank, from which on the next round is for many: it costs three collectives, or four
_MOST_CELLS = 1024  # that a rank tells in a round for many; a row that was begun is told whole
_APART = "\0"  # in names that stand for what has an exchange of its own: each once in a round for many


class Negotiation:
    """Finds out which rows the next round is for, and what this rank contributes to it."""

    def __init__(self) -> None:
        self.many_wait = False  # on some rank: the next round is one for many rows
        self.batch: list[Key] | None = None  # the cells of the next round, if it is one for many rows
        self.offered: dict[Key, Contributed] = {}  # what this rank contributes to the next round
        self.needs_names = False  # for the next thing that this rank would contribute in a round for many rows
        self._focus: tuple[int, ...] = ()
        self._turns: dict[tuple[Place, str], int] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether the next round has to go on with what the last one began."""
        return bool(self._focus or self._turns)

    def begin_anew(self) -> None:
        """Forget what was looked for: it may have been a lost rank's."""
        self._focus = ()
        self._turns.clear()
        self.batch = None

    # One row

    def propose(self, outbox: Outbox) -> tuple[Place | None, dict[str, Contributed]]:
        """The position of the row that this rank would contribute in a round for one row, and what is due there."""
        place = outbox.next_place(self._focus)
        due = {} if place is None else outbox.due(place, self._turns)
        self.offered = {} if place is None else {Key(place, name, one.occurrence): one for name, one in due.items()}
        return place, due

    def received(self, header: Header, names: Names, sums: Sequence[float], maxima: Sequence[float]) -> list[Received]:
        """What all ranks together contributed in a round for one row: nothing if they proposed different ones."""
        place, self._focus = header.proposed()
        if place is None:
            return []
        received = []
        for name, first, last, summed, largest in read_row(names, sums, maxima):
            if first == last:
                received.append(Received(Key(place, name, first), Totals.from_lanes(summed, largest), header.origin))
                if self._turns:
                    self._turns.pop((place, name), None)
            else:
                self._turns[place, name] = first
        return received

    # Many rows

    def offer(self, outbox: Outbox, names: Names) -> list[Run]:
        """In which cells this rank has something to contribute, as JSON can hold it."""
        self.offered, self.needs_names = {}, False
        rows: list[Row] = []
        apart: set[str] = set()
        for row in outbox.rows(names):
            if row is None:
                self.needs_names = True
                break
            place, values = row
            own_exchange = {name for name in values if _APART in name}
            if len(self.offered) >= _MOST_CELLS or own_exchange & apart:
                break
            apart |= own_exchange
            self.offered.update((Key(place, name, one.occurrence), one) for name, one in values.items())
            rows.append(tuple(Slot(*place, names[name].index, one.occurrence) for name, one in values.items()))
        return encoded(rows)

    def agree(self, offers: Iterable[Iterable[Sequence[Any]]], names: Iterable[str]) -> None:
        """Make the next round one for the cells that the ranks offered, given in the order of ranks."""
        rows = [decoded((Run(*run) for run in runs), 2 * _MOST_CELLS) for runs in offers]
        by_index = list(names)
        self.batch = [
            Key(Place(slot.counted, slot.step), by_index[slot.name], slot.occurrence)
            for slot in merged(rows, 2 * _MOST_CELLS)
        ]
        self.offered = {key: self.offered[key] for key in self.batch if key in self.offered}

    def rows_offered(self) -> int:
        """How many rows this rank contributes to a round for many."""
        return len({one.origin if key.place.counted else key.place for key, one in self.offered.items()})

    def received_in(self, batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> list[Received]:
        """What all ranks together contributed in a round for many rows."""
        self._focus = ()  # whose turn it is, and which position is to be next, was of what may be contributed by now
        self._turns.clear()
        return read_batch(batch, sums, maxima)

    # What a rank that joins needs to go on

    def snapshot(self) -> dict[str, Any]:
        """As JSON can hold it."""
        turns = [[*place, name, turn] for (place, name), turn in self._turns.items()]
        return {"many_wait": self.many_wait, "focus": self._focus, "turns": turns}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what others know."""
        self.many_wait = bool(snapshot["many_wait"])
        self._focus = tuple(snapshot["focus"])
        self._turns = {(Place(counted, step), name): turn for counted, step, name, turn in snapshot["turns"]}
