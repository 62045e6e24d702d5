"""The data of the protocol: cells, the contributions of one rank or of all ranks to them, and finished values. Pure."""

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
"""Indices, and the number of ranks that sent them."""


def total_of(counted: Iterable[Counted]) -> Counter[int]:
    """Return the number of ranks that sent each index."""
    total: Counter[int] = Counter()
    for indices, count in counted:
        for index in indices:
            total[index] += count
    return total


class Position(NamedTuple):
    """The position of a row."""

    counted: int  # 0 if the user gave a step; 1 if not: contributions are then counted by name
    step: int  # the step; 0 if there is none


class Key(NamedTuple):
    """A cell: the contributions of all ranks to one name at one position, for the same occurrence."""

    position: Position
    name: str  # the text of the series; for a number, its name
    occurrence: int  # how often a rank had logged the series there before

    @property
    def series(self) -> Series:
        """The series: the name that the user gave, its kind, and its layout."""
        return series_of(self.name)

    @classmethod
    def of(cls, items: Sequence[Any]) -> Key:
        """Return a key that JSON has turned into lists."""
        (counted, step), name, occurrence = items
        return cls(Position(counted, step), name, occurrence)


class Contributed(NamedTuple):
    """The contribution of one rank, or of all ranks together, to one cell in a round."""

    key: Key  # the cell
    totals: Totals  # the contribution
    origin: float  # as in `Cell`

    def with_later(self, other: Contributed) -> Contributed:
        """Merge with the contributions of ranks that had to contribute other rows of the round first."""
        return Contributed(self.key, self.totals + other.totals, max(self.origin, other.origin))


@dataclass(slots=True)
class Cell:
    """The state of an open cell."""

    born: int  # the round in which it was opened
    totals: Totals = Totals()  # noqa: RUF009  # cannot be changed  # all contributions so far
    origin: float = NOTHING  # -(rank * 2**32 + calls): the lowest rank that contributed, and its number of calls
    corrects: bool = False  # whether it was finished before
    number: int = 0  # number of cells opened before it
    displaced: bool = False  # whether contributions to it may have overtaken others, so that `number` proves nothing
    gone: int = 0  # number of its contributors that have left, so that other ranks have yet to contribute


@dataclass(slots=True)
class Spread:
    """The spread of a name's numbers over the ranks; known one round after its cell is finished."""

    squares: float = 0.0  # sum of w * (x - mean)**2
    largest_at: int = -1  # the lowest rank that has the largest number, or a NaN if there is one


class Finished(NamedTuple):
    """A value to be written: all contributions to one cell.

    Args:
        key: The cell.
        totals: All contributions. Empty, without contributors, if this only flags a written value that is forgotten.
        calls: Number of `log` calls of the lowest contributing rank: the x axis of rows without a step.
        corrects: Whether a value of this cell was finished before; this one replaces it.
        missing: Number of missing ranks that usually contribute: they left without notice, or a rank gave up waiting.
        spread: The spread over ranks, for names whose spread is wanted.
    """

    key: Key
    totals: Totals
    calls: int
    corrects: bool
    missing: int
    spread: Spread | None = None

    def as_list(self) -> list[Any]:
        """Return it as JSON values."""
        return [*self[:-1], None if self.spread is None else [self.spread.squares, self.spread.largest_at]]

    @classmethod
    def from_list(cls, items: Sequence[Any]) -> Finished:
        """Return the inverse of `as_list`."""
        key, totals, calls, corrects, missing, spread = items
        return cls(Key.of(key), Totals(*totals), calls, corrects, missing, None if spread is None else Spread(*spread))


@dataclass(frozen=True)
class Outcome:
    """The result of a round; the same on all ranks, except for `late`, `lost` and `silent`.

    Args:
        finished: Values to write, in this order. Values of one position belong in one row.
        needs_names: Whether names must be exchanged before the next round: `unknown` on every rank, then `learn`.
        closed: Whether all ranks are closing and nothing remains: no further round takes place.
        paused: Whether all ranks have paused, and all their contributions are finished.
        more: Whether some rank has more to contribute: the next round need not wait for anything.
        regroup: Whether a rank requested a new generation before the next round.
        late: Cells to which this rank contributed in this round after they were finished.
        lost: Cells to which this rank contributed so late that the others' contributions are forgotten: not written.
        silent: Cells without a contribution of this rank that were finished because a rank gave up waiting for the
            ranks that usually contribute.
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
    """Return a cell as JSON values."""
    return [key, cell.born, cell.totals, cell.origin, cell.corrects, cell.number, cell.displaced]


def cell_from_list(items: Sequence[Any]) -> tuple[Key, Cell]:
    """Return the inverse of `cell_as_list`."""
    key, born, totals, *rest = items
    return Key.of(key), Cell(born, Totals(*totals), *rest)
