"""The two lists of numbers of a round: one is summed over the ranks, the other is reduced by maximum. Pure.

The second list begins with a `Header`. In a round for rows, each row that the round has room for follows: in the second
list a `Proposal`, then in both lists the lanes of each name that is agreed on. These are its totals and, in the second
list, its occurrence as a pair. In a round for many cells, the lanes of each cell follow instead: its totals and, in the
second list, its origin. The lists end with the spreads of the values that await theirs: the sum of squares in the first
list, and the rank of the largest number in the second.

A pair holds (x, -x), so its maxima are the largest x and, negated, the smallest x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

from dist_wandb.exchange.protocol.aggregates import MAX_LANES, SUM_LANES, Totals
from dist_wandb.exchange.protocol.cells import NOTHING, Contributed, Finished, Key, Position
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.spreads import Spreads

Lists = tuple[list[float], list[float]]

OVERTAKING = 1.0  # some contributions may precede others that were logged earlier: see `Outbox`
INTERLEAVED = 2.0  # from now on: it logs from several threads or processes, each in its own order

_PER_NAME = MAX_LANES + 2
_PER_CELL = MAX_LANES + 1
_CONTRIBUTORS = 3  # position of the number of contributors in the sums of a name

_NO_SUMS = (0.0,) * SUM_LANES
_NO_MAXIMA = (NOTHING,) * _PER_NAME


class Header(NamedTuple):
    """The flags and counts that a rank sends with its numbers; reduced by maximum: any rank's flag applies to all."""

    unknown: float = NOTHING  # whether it has names that are not agreed on
    busy: float = NOTHING  # whether it continues: it is not closing, or has contributions left
    give_up_new: float = NOTHING  # the round up to which it gives up cells of names that were never finished
    give_up_all: float = NOTHING  # the round up to which it gives up all cells
    more: float = NOTHING  # whether it has more to contribute
    regroup: float = NOTHING  # whether it requests a new generation
    contributing: float = NOTHING  # whether it may contribute more: it is open, or has contributions left
    backlog: float = NOTHING  # number of further rows that wait on it
    disorder: float = NOTHING  # `OVERTAKING` or `INTERLEAVED`, if its order does not show what it has logged
    published: float = NOTHING  # how often it has published something through the job's store


class Proposal(NamedTuple):
    """The row that a rank contributes in one of the row slots of a round; reduced by maximum."""

    last_counted: float = NOTHING  # of its position, as `Position.counted`; a pair with the next field
    first_counted: float = NOTHING  # the same, negated
    last_step: float = NOTHING  # its step; a pair with the next field
    first_step: float = NOTHING  # the same, negated
    origin: float = NOTHING  # as in `Cell`

    @classmethod
    def of(cls, position: Position, due: Mapping[str, Contributed]) -> Proposal:
        """Return the proposal of a row."""
        counted, step = map(float, position)
        origin = max((one.origin for one in due.values()), default=NOTHING)
        return cls(counted, -counted, step, -step, origin)

    def agreed(self) -> tuple[Position | None, tuple[int, ...]]:
        """Return the position that all proposals share; otherwise `None`, and what the next ones must begin with."""
        if self.last_counted == NOTHING:
            return None, ()
        counted, step = int(-self.first_counted), int(-self.first_step)
        if self.last_counted != counted:
            return None, (counted,)
        return (Position(counted, step), ()) if self.last_step == step else (None, (counted, step))


_HEADER = len(Header._fields)
_PROPOSAL = len(Proposal._fields)


def header_of(maxima: Sequence[float]) -> Header:
    """Return the header of a reduced second list."""
    return Header._make(maxima[:_HEADER])


# Rounds for rows


def row_lists(
    header: Header,
    names: Names,
    rows: Sequence[tuple[Position, Mapping[str, Contributed]]],
    room: int,
    spreads: Spreads,
) -> Lists:
    """Return a rank's lists for a round for rows, given its contributions to each row by name."""
    sums: list[float] = []
    maxima: list[float] = [*header]
    for position, due in rows:
        maxima += Proposal.of(position, due)
        for contributed in map(due.get, names):
            if contributed is None:
                sums += _NO_SUMS
                maxima += _NO_MAXIMA
            else:
                (_, _, occurrence), totals, _ = contributed
                sums += totals[:SUM_LANES]
                maxima += (totals.largest, -totals.smallest, occurrence, -occurrence)
    empty = room - len(rows)
    sums += [0.0] * (empty * SUM_LANES * len(names))
    maxima += [NOTHING] * (empty * _per_row(names))
    _add_spreads(sums, maxima, spreads)
    return sums, maxima


def _per_row(names: Names) -> int:
    return _PROPOSAL + _PER_NAME * len(names)


def proposals(names: Names, room: int, maxima: Sequence[float]) -> list[Proposal]:
    """Return the reduced proposals of the rows that were proposed."""
    starts = (_HEADER + row * _per_row(names) for row in range(room))
    return [Proposal._make(maxima[start : start + _PROPOSAL]) for start in starts if maxima[start] != NOTHING]


def read_row(
    names: Names, row: int, sums: Sequence[float], maxima: Sequence[float]
) -> Iterator[tuple[str, int, int, Totals]]:
    """Yield the first and last occurrence and the totals of each name with contributions in one row of a round."""
    start, largest = row * SUM_LANES * len(names), _HEADER + row * _per_row(names) + _PROPOSAL
    contributors = sums[start + _CONTRIBUTORS : start + SUM_LANES * len(names) : SUM_LANES]
    for index, name in compress(enumerate(names), contributors):
        at = largest + index * _PER_NAME
        last, first = maxima[at + MAX_LANES], -maxima[at + MAX_LANES + 1]
        yield name, int(first), int(last), Totals.from_lanes(sums, start + index * SUM_LANES, maxima, at)


# Spreads


def _add_spreads(sums: list[float], maxima: list[float], spreads: Spreads) -> None:
    """Append this rank's part in the spreads of all values that await theirs."""
    for value in spreads.awaiting:
        squares, largest_at = spreads.part(value)
        sums.append(squares)
        maxima.append(largest_at)


def read_spreads(values: Sequence[Finished], sums: Sequence[float], maxima: Sequence[float]) -> None:
    """Complete the spreads of all values that awaited theirs."""
    first, at = len(sums) - len(values), len(maxima) - len(values)
    for number, value in enumerate(values):
        if value.spread is not None:
            largest_at = maxima[at + number]
            value.spread.squares = sums[first + number]
            value.spread.largest_at = -1 if largest_at == NOTHING else int(-largest_at)


# Rounds for many cells


def batch_lists(
    header: Header, batch: Sequence[Key], contributions: Mapping[Key, Contributed], spreads: Spreads
) -> Lists:
    """Return a rank's lists for a round for many cells, given its contributions by cell."""
    sums: list[float] = []
    maxima: list[float] = [*header]
    for key in batch:
        contributed = contributions.get(key)
        if contributed is None:
            sums += _NO_SUMS
            maxima += _NO_MAXIMA[:_PER_CELL]
        else:
            summed, largest = contributed.totals.lanes()
            sums += summed
            maxima += largest
            maxima.append(contributed.origin)
    _add_spreads(sums, maxima, spreads)
    return sums, maxima


def read_batch(batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> list[Contributed]:
    """Return the contributions of all ranks together to the cells of a round for many cells."""
    received = []
    start, largest = 0, _HEADER
    for key in batch:
        if sums[start + _CONTRIBUTORS]:
            totals = Totals.from_lanes(sums, start, maxima, largest)
            received.append(Contributed(key, totals, maxima[largest + MAX_LANES]))
        start, largest = start + SUM_LANES, largest + _PER_CELL
    return received
