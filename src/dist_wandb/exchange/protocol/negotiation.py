"""Which rows the next round is for. Pure, and equal on all ranks: it changes by reduced numbers alone.

States:

- *In step* (the usual one): each rank proposes the positions of the oldest rows that it has, as many as the round has
  `room` for. Up to the first row for which they do not propose the same, the round is for these rows: it is as if each
  had a round. There is room for as many as waited on some rank at the last round, and for fewer again after a while.
- *Looking for the next row*: the first proposals were not the same, and `focus` holds what the next ones must begin
  with: the smallest `counted`, then the smallest step. Each round without an agreement makes it longer, so the third
  one agrees. Names for which ranks contribute different occurrences at a position take `turns`: the smallest one is
  next. Meanwhile a round is for one row.
- *Many cells* (`many_wait`): eight rows or more wait on some rank, and the ranks are not in step, or have too many
  names for room. Before the round each rank sends in which cells it has something (`offer`); all make the same list of
  these (`agree`), and the round is for the cells of this `batch`. It ends what `focus` and `turns` were looking for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.batches import Row, Run, Slot, decoded, encoded, merged
from dist_wandb.exchange.protocol.cells import Contributed, Key, Place
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.outbox import Outbox
from dist_wandb.exchange.protocol.series import is_attached
from dist_wandb.exchange.protocol.wire import proposals, read_batch, read_row

MANY = 8  # rows that wait on some rank, from which on a round for many cells is worth its three or four collectives
_MOST_CELLS = 1024  # that a rank contributes to a round; a row that was begun is contributed whole
_SPARED = 8  # rounds after which there is room for as many rows as these have needed
_new = tuple.__new__  # of named tuples, without a call in between: it is on the way of every number


_Received = tuple[list[Contributed], list[Contributed]]  # by all ranks together, and by this rank


class _Last(NamedTuple):
    """What the last round shows about the next one.

    Args:
        rows: For how many rows there were proposals.
        left: How many of these wait for the ranks to agree.
        in_step: Whether the ranks contributed the same rows.
    """

    rows: int = 0
    left: int = 0
    in_step: bool = True


def _most_rows(names: Names) -> int:
    """For how many rows there may be room."""
    return max(1, _MOST_CELLS // max(1, len(names)))


def _attached(names: Iterable[str]) -> set[str]:
    """Those that stand for attachments, which have an exchange of their own: each once in a round for many."""
    return set(filter(is_attached, names))


class Negotiation:
    """Finds out which rows the next round is for, and what this rank contributes to it."""

    def __init__(self) -> None:
        self.many_wait: bool = False  # on some rank: the next round is one for many cells
        self.batch: list[Key] | None = None  # its cells
        self.needs_names: bool = False  # for the next thing that this rank would contribute
        self._proposed: list[dict[str, Contributed]] = []  # what this rank contributes to the next round, row by row
        self.offered: dict[Key, Contributed] = {}  # and to one for many cells
        self._focus: tuple[int, ...] = ()
        self._turns: dict[tuple[Place, str], int] = {}
        self._last = _Last()
        self._room = 1  # how many rows any other round is for, if there are not too many names
        self._needed = (0, 0)  # rows that the last few rounds needed room for, and how many rounds these are

    @property
    def is_under_way(self) -> bool:
        """Whether the next round has to go on with what the last one began."""
        return bool(self._focus or self._turns)

    def room(self, names: Names) -> int:
        """How many rows the next round is for, unless it is one for many cells."""
        return min(self._room, _most_rows(names))

    def begin_anew(self) -> None:
        """Forget what was looked for: it may have been a lost rank's."""
        self._focus = ()
        self._turns.clear()
        self.batch = None

    def look_ahead(self, backlog: float, names: Names) -> None:
        """Decide what the next round is for.

        Args:
            backlog: How many rows wait on some rank, beside those of the last round.
            names: The names that are agreed on.
        """
        last = self._last
        needed, rounds = max(self._needed[0], min(last.rows + int(backlog), _MOST_CELLS), 1), self._needed[1] + 1
        is_over = rounds == _SPARED
        self._room = needed if is_over else max(needed, self._room)
        self._needed = (0, 0) if is_over else (needed, rounds)
        self.many_wait = backlog + last.left >= MANY and not (last.in_step and _most_rows(names) >= MANY)

    # Rows

    def propose(self, outbox: Outbox, names: Names) -> list[tuple[Place, dict[str, Contributed]]]:
        """The rows that this rank would contribute in a round for rows."""
        place = outbox.next_place(self._focus)
        self.needs_names = place is not None and not outbox.waiting[place].keys() <= names.keys()
        rows = []
        if place is not None:
            is_one = self.is_under_way or self.needs_names
            rows = [(place, outbox.due(place, self._turns))] if is_one else self._upcoming(outbox, names)
        self._proposed = [due for _, due in rows]
        return rows

    def _upcoming(self, outbox: Outbox, names: Names) -> list[tuple[Place, dict[str, Contributed]]]:
        """The oldest rows, as many as there is room for."""
        rows = []
        apart: set[str] = set()
        for row in islice(outbox.rows(names), self.room(names)):
            attached = _attached(row[1]) if row else apart
            if row is None or attached & apart:
                break
            apart |= attached
            rows.append(row)
        return rows

    def received(self, names: Names, sums: Sequence[float], maxima: Sequence[float]) -> _Received:
        """What all ranks together contributed in a round for rows, up to where they are not in step."""
        received: dict[Key, Contributed] = {}
        own: list[Contributed] = []
        rows = proposals(names, self.room(names), maxima)
        self._focus, taken = (), 0
        for proposal in rows:
            place, self._focus = proposal.agreed()
            if place is None:
                break
            offered = self._proposed[taken] if taken < len(self._proposed) else {}
            for name, first, last, totals in read_row(names, taken, sums, maxima):
                if first != last:
                    self._turns[place, name] = first
                    continue
                mine = offered.get(name)
                key = Key(place, name, first) if mine is None else mine.key
                one = _new(Contributed, (key, totals, proposal.origin))
                received[key] = received[key].with_later(one) if key in received else one
                if mine is not None:
                    own.append(mine)
                if self._turns:
                    self._turns.pop((place, name), None)
            taken += 1
            if self._turns:
                break
        self._last = _Last(len(rows), max(0, len(rows) - taken - 1), in_step=not self.is_under_way)
        return list(received.values()), own

    # Many cells

    def offer(self, outbox: Outbox, names: Names) -> list[Run]:
        """In which cells this rank has something to contribute, as JSON can hold it."""
        offered: dict[Key, Contributed] = {}
        self.needs_names = False
        rows: list[Row] = []
        apart: set[str] = set()
        for row in outbox.rows(names):
            if row is None:
                self.needs_names = True
                break
            place, values = row
            attached = _attached(values)
            if len(offered) >= _MOST_CELLS or attached & apart:
                break
            apart |= attached
            offered.update((one.key, one) for one in values.values())
            rows.append(tuple(Slot(*place, names[name].index, one.key.occurrence) for name, one in values.items()))
        self.offered = offered
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
        longest = max(rows, key=len, default=[])
        self._last = _Last(in_step=all(longest[: len(row)] == row for row in rows))

    def rows_offered(self) -> int:
        """How many rows this rank contributes to a round for many cells."""
        return len({one.origin if key.place.counted else key.place for key, one in self.offered.items()})

    def received_in(self, batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> _Received:
        """What all ranks together contributed in a round for many cells, and which part of it this rank did."""
        self._focus = ()  # whose turn it is, and which position is to be next, was of what may be contributed by now
        self._turns.clear()
        received, offered = read_batch(batch, sums, maxima), self.offered
        return received, [offered[key] for key, *_ in received if key in offered]

    # What a rank that joins needs to go on

    def snapshot(self) -> dict[str, Any]:
        """As JSON can hold it."""
        turns = [[*place, name, turn] for (place, name), turn in self._turns.items()]
        return {
            "many_wait": self.many_wait,
            "room": self._room,
            "needed": self._needed,
            "focus": self._focus,
            "turns": turns,
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what others know."""
        self.many_wait = bool(snapshot["many_wait"])
        self._room = int(snapshot["room"])
        self._needed = tuple(snapshot["needed"])
        self._focus = tuple(snapshot["focus"])
        self._turns = {(Place(counted, step), name): turn for counted, step, name, turn in snapshot["turns"]}
