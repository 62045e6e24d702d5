"""The data of the protocol: cells, what one rank and all ranks contribute to them, and what is finished. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.series import Series, series_of

NOTHING = -math.inf  # the maximum of no numbers
CALLS = 2**32  # more than a rank ever logs; with ranks below 2**20, origins are exact in float64


Counted: TypeAlias = "tuple[Sequence[int], int]"
"""Positions, and how many ranks gave them."""


def total_of(counted: Iterable[Counted]) -> Counter[int]:
    """How many ranks gave each position."""
    total: Counter[int] = Counter()
    for positions, count in counted:
        for position in positions:
            total[position] += count
    return total


class Place(NamedTuple):
    """Where a row belongs.

    Args:
        counted: 0 where the user gave a step; 1 where none was given: contributions are then counted by name.
        step: The step; 0 where none was given.
    """

    counted: int
    step: int


class Key(NamedTuple):
    """A cell: what all ranks say of one name at one place, each for the same time.

    Args:
        place: Where it belongs.
        name: The text of the series: for a number its name.
        occurrence: How often a rank had logged the series there before.
    """

    place: Place
    name: str
    occurrence: int

    @property
    def series(self) -> Series:
        """The series: the name that the user gave, of what kind it is, and its layout."""
        return series_of(self.name)

    @classmethod
    def of(cls, items: Sequence[Any]) -> Key:
        """The key of which JSON has made lists."""
        (counted, step), name, occurrence = items
        return cls(Place(counted, step), name, occurrence)


class Contributed(NamedTuple):
    """What one rank, or all of them together, contribute to one cell in a round.

    Args:
        key: The cell.
        totals: What is contributed.
        origin: As in `Cell`.
    """

    key: Key
    totals: Totals
    origin: float

    def with_later(self, other: Contributed) -> Contributed:
        """Together with what ranks contributed in a later row of the round, as they had others to contribute before."""
        return Contributed(self.key, self.totals + other.totals, max(self.origin, other.origin))


@dataclass(slots=True)
class Cell:
    """What the unit knows of one name at one place while it is open.

    Args:
        born: The round in which it was opened.
        totals: What was contributed.
        origin: Who contributed first in the order of ranks, and its count of calls: -(rank * 2**32 + calls).
        corrects: Whether it was finished before.
        number: How many were opened before it.
        gone: How many of its contributors are of ranks that are gone, so that others have yet to speak.
    """

    born: int
    totals: Totals = Totals()  # noqa: RUF009  # cannot be changed
    origin: float = NOTHING
    corrects: bool = False
    number: int = 0
    gone: int = 0


@dataclass(slots=True)
class Spread:
    """How a name's numbers spread over the ranks; known one round after its cell is finished.

    Args:
        squares: Sum of w * (x - mean)**2.
        largest_at: The lowest rank that has the largest number, or a NaN where there is one.
    """

    squares: float = 0.0
    largest_at: int = -1


class Finished(NamedTuple):
    """A value to be written: all that was contributed to one cell.

    Args:
        key: The cell.
        totals: What was contributed; of no rank where a value that was written, and is forgotten, is flagged.
        calls: Count of `log` calls of the lowest rank that contributed: the x axis of rows without a step.
        corrects: Whether a value of this cell was finished before; this one takes its place.
        missing: How many ranks are missing that usually contribute: they have left without a word, or patience ran out.
        spread: The spread over ranks, for names of which it is wanted.
    """

    key: Key
    totals: Totals
    calls: int
    corrects: bool
    missing: int
    spread: Spread | None = None

    def without_spread(self) -> Finished:
        """The value, of which the spread cannot be known, as a rank that contributed is gone."""
        return self._replace(spread=None)

    def as_list(self) -> list[Any]:
        """As JSON can hold it."""
        spread = None if self.spread is None else [self.spread.squares, self.spread.largest_at]
        return [*self.key.place, *self.key[1:], list(self.totals), self.calls, self.corrects, self.missing, spread]

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> Finished:
        """The inverse of `as_list`."""
        counted, step, name, occurrence, totals, calls, corrects, missing, spread = items
        key = Key(Place(counted, step), name, occurrence)
        return cls(key, Totals(*totals), calls, corrects, missing, None if spread is None else Spread(*spread))


@dataclass(frozen=True)
class Outcome:
    """What a round led to; the same on all ranks.

    Args:
        finished: Values to be written, in this order. Those of one place belong into one row.
        needs_names: Whether names must be exchanged before the next round: `unknown` on every rank, then `learn`.
        closed: Whether all ranks are closing and nothing is left: no further round takes place.
        paused: Whether all ranks have paused: all that any of them said is finished.
        more: Whether some rank has more to say at once: the next round need not wait for anything.
        regroup: Whether a rank asked for the ranks that take part to be agreed on anew before the next round.
        late: Of what this rank contributed in this round, what came after its value was finished.
        lost: What this rank contributed so late that the others' part is forgotten: it is not written.
        silent: What was finished as a rank did not wait any longer for those that usually contribute, this one among
            them.
    """

    finished: tuple[Finished, ...] = ()
    needs_names: bool = False
    closed: bool = False
    paused: bool = False
    more: bool = False
    regroup: bool = False
    late: tuple[Key, ...] = field(default=(), compare=False)
    lost: tuple[Key, ...] = field(default=(), compare=False)
    silent: tuple[Key, ...] = field(default=(), compare=False)


def cell_as_list(key: Key, cell: Cell) -> list[Any]:
    """A cell as JSON can hold it."""
    return [*key.place, *key[1:], cell.born, list(cell.totals), cell.origin, cell.corrects, cell.number]


def cell_from_list(items: Sequence[Any]) -> tuple[Key, Cell]:
    """The inverse of `cell_as_list`."""
    counted, step, name, occurrence, born, totals, origin, corrects, number = items
    cell = Cell(born, Totals(*totals), origin, corrects=corrects, number=number)
    return Key(Place(counted, step), name, occurrence), cell
