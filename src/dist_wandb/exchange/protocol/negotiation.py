"""The choice of the rows that the next round is for. Pure, and equal on all ranks: it depends on reduced numbers only.

States:

- *In step* (the usual state): each rank proposes the positions of its oldest rows, as many as the round has `room` for.
  The round is for the rows before the first one for which the proposals differ, as if each row had a round of its own.
  There is room for as many rows as waited on some rank at the last round; the room shrinks again after some rounds.
- *Looking for the next row*: the first proposals differed, and `focus` holds what the next ones must begin with: the
  smallest `counted`, then the smallest step. Each round without agreement makes `focus` longer, so the third one
  agrees. Names for which ranks contribute different occurrences at a position take `turns`: the smallest occurrence is
  next. In this state a round is for one row.
- *Many cells* (`many_wait`): eight rows or more wait on some rank, and the ranks are not in step, or have too many
  names for room. Before the round, each rank sends the cells that it has contributions for (`offer`). All ranks merge
  these into the same list (`agree`), and the round is for the cells of this `batch`. It ends the search by `focus` and
  `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from dist_wandb.exchange.protocol.batches import Row, Run, Slot, decoded, encoded, merged
from dist_wandb.exchange.protocol.cells import Contributed, Key, Position
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.outbox import Outbox
from dist_wandb.exchange.protocol.series import is_attached
from dist_wandb.exchange.protocol.wire import proposals, read_batch, read_row

MANY = 8  # waiting rows on some rank that make a round for many cells worth its three or four collectives
_MOST_CELLS = 1024  # cells that a rank contributes to a round; the last row may exceed it
_SPARED = 8  # rounds after which the room shrinks to what these rounds have needed
_new = tuple.__new__  # of named tuples, without a call in between: it is called for every number

_Received = tuple[list[Contributed], list[Contributed]]  # by all ranks together, and by this rank


class _Last(NamedTuple):
    """Facts about the last round that decide about the next one."""

    rows: int = 0  # number of rows with proposals
    left: int = 0  # how many of these wait until the ranks agree
    in_step: bool = True  # whether the ranks contributed the same rows


def _most_rows(names: Names) -> int:
    """Return the maximum number of rows for which there may be room."""
    return max(1, _MOST_CELLS // max(1, len(names)))


def _attached(names: Iterable[str]) -> set[str]:
    """Return the names that stand for attachments, of which a round for several rows may contain each only once."""
    return set(filter(is_attached, names))


class Negotiation:
    """Chooses the rows of the next round, and this rank's contributions to it."""

    def __init__(self) -> None:
        self.many_wait: bool = False  # on some rank: the next round is for many cells
        self.batch: list[Key] | None = None  # the cells of that round
        self.needs_names: bool = False  # this rank's next contribution has a name that is not agreed on
        self._proposed: list[dict[str, Contributed]] = []  # this rank's contributions to the next round, by row
        self.offered: dict[Key, Contributed] = {}  # this rank's contributions to a round for many cells
        self._focus: tuple[int, ...] = ()
        self._turns: dict[tuple[Position, str], int] = {}
        self._last = _Last()
        self._room = 1  # number of rows of any other round, unless there are too many names
        self._needed = (0, 0)  # rows that the last few rounds needed room for, and the number of these rounds

    @property
    def is_under_way(self) -> bool:
        """Whether the next round has to continue a search that the last one began."""
        return bool(self._focus or self._turns)

    @property
    def is_split(self) -> bool:
        """Whether the last round was for a part of a row without a step, some of whose names take turns."""
        return bool(self._turns) and any(position.counted for position, _ in self._turns)

    def room(self, names: Names) -> int:
        """Return the number of rows of the next round, unless it is for many cells."""
        return min(self._room, _most_rows(names))

    def begin_anew(self) -> None:
        """Reset the search, which may have been for the row of a lost rank."""
        self._focus = ()
        self._turns.clear()
        self.batch = None

    def look_ahead(self, backlog: float, names: Names) -> None:
        """Choose the kind and the room of the next round.

        Args:
            backlog: Number of rows that wait on some rank, excluding those of the last round.
            names: The names that the ranks have agreed on.
        """
        last = self._last
        needed, rounds = max(self._needed[0], min(last.rows + int(backlog), _MOST_CELLS), 1), self._needed[1] + 1
        is_over = rounds == _SPARED
        self._room = needed if is_over else max(needed, self._room)
        self._needed = (0, 0) if is_over else (needed, rounds)
        self.many_wait = backlog + last.left >= MANY and not (last.in_step and _most_rows(names) >= MANY)

    # Rows

    def propose(self, outbox: Outbox, names: Names) -> list[tuple[Position, dict[str, Contributed]]]:
        """Return this rank's rows for a round for rows."""
        position = outbox.next_position(self._focus)
        self.needs_names = position is not None and not outbox.waiting[position].keys() <= names.keys()
        rows = []
        if position is not None:
            is_one = self.is_under_way or self.needs_names
            rows = [(position, outbox.due(position, self._turns))] if is_one else self._upcoming(outbox, names)
        self._proposed = [due for _, due in rows]
        return rows

    def _upcoming(self, outbox: Outbox, names: Names) -> list[tuple[Position, dict[str, Contributed]]]:
        """Return the oldest rows, as many as there is room for."""
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
        """Return all ranks' and this rank's contributions in a round for rows, up to where the proposals differ."""
        received: dict[Key, Contributed] = {}
        own: list[Contributed] = []
        rows = proposals(names, self.room(names), maxima)
        self._focus, taken = (), 0
        for proposal in rows:
            position, self._focus = proposal.agreed()
            if position is None:
                break
            offered = self._proposed[taken] if taken < len(self._proposed) else {}
            for name, first, last, totals in read_row(names, taken, sums, maxima):
                if first != last:
                    self._turns[position, name] = first
                    continue
                mine = offered.get(name)
                key = Key(position, name, first) if mine is None else mine.key
                one = _new(Contributed, (key, totals, proposal.origin))
                received[key] = received[key].with_later(one) if key in received else one
                if mine is not None:
                    own.append(mine)
                if self._turns:
                    self._turns.pop((position, name), None)
            taken += 1
            if self._turns:
                break
        self._last = _Last(len(rows), max(0, len(rows) - taken - 1), in_step=not self.is_under_way)
        return list(received.values()), own

    # Many cells

    def offer(self, outbox: Outbox, names: Names) -> list[Run]:
        """Return the cells that this rank has contributions for, as JSON values."""
        offered: dict[Key, Contributed] = {}
        self.needs_names = False
        rows: list[Row] = []
        apart: set[str] = set()
        for row in outbox.rows(names):
            if row is None:
                self.needs_names = True
                break
            position, values = row
            attached = _attached(values)
            if len(offered) >= _MOST_CELLS or attached & apart:
                break
            apart |= attached
            offered.update((one.key, one) for one in values.values())
            rows.append(tuple(Slot(*position, names[name].index, one.key.occurrence) for name, one in values.items()))
        self.offered = offered
        return encoded(rows)

    def agree(self, offers: Iterable[Iterable[Sequence[Any]]], names: Iterable[str]) -> None:
        """Make the next round one for the cells that the ranks offered, given in rank order."""
        rows = [decoded((Run(*run) for run in runs), 2 * _MOST_CELLS) for runs in offers]
        by_index = list(names)
        self.batch = [
            Key(Position(slot.counted, slot.step), by_index[slot.name], slot.occurrence)
            for slot in merged(rows, 2 * _MOST_CELLS)
        ]
        self.offered = {key: self.offered[key] for key in self.batch if key in self.offered}
        longest = max(rows, key=len, default=[])
        self._last = _Last(in_step=all(longest[: len(row)] == row for row in rows))

    def rows_offered(self) -> int:
        """Return the number of rows that this rank contributes to a round for many cells."""
        return len({one.origin if key.position.counted else key.position for key, one in self.offered.items()})

    def received_in(self, batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> _Received:
        """Return all ranks' and this rank's contributions in a round for many cells."""
        self._focus = ()  # the search may have been for contributions that this round has taken
        self._turns.clear()
        received, offered = read_batch(batch, sums, maxima), self.offered
        return received, [offered[key] for key, *_ in received if key in offered]

    # The state that a joining rank takes over

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        turns = [[*position, name, turn] for (position, name), turn in self._turns.items()]
        state = {"many_wait": self.many_wait, "room": self._room, "needed": self._needed}
        return {**state, "focus": self._focus, "turns": turns}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over the state of the other ranks."""
        self.many_wait = bool(snapshot["many_wait"])
        self._room = int(snapshot["room"])
        self._needed = tuple(snapshot["needed"])
        self._focus = tuple(snapshot["focus"])
        self._turns = {(Position(counted, step), name): turn for counted, step, name, turn in snapshot["turns"]}
