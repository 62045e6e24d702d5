"""The two lists of numbers of a round: one is summed over the ranks, the other one reduced by maximum. Pure.

The second list begins with a `Header`. In a round for one row there follow the lanes of each name that is agreed on:
its totals, in the first list the sum of squares of its spread, in the second one its occurrence, as a pair, and where
its largest number is. In a round for many rows there follow the lanes of each cell instead: its totals, and in the
second list its origin; then, of each value that awaits its spread, the sum of squares, and where its largest number is.

A pair holds (x, -x), so that its maxima are the largest and, negated, the smallest x.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dist_wandb.exchange.protocol.aggregates import MAX_LANES, SUM_LANES, Totals
from dist_wandb.exchange.protocol.cells import NOTHING, Contributed, Finished, Key, Place, Received
from dist_wandb.exchange.protocol.names import Names
from dist_wandb.exchange.protocol.spreads import Spreads

Lists = tuple[list[float], list[float]]

_PER_NAME = MAX_LANES + 3
_SUMS_PER_NAME = SUM_LANES + 1
_PER_CELL = MAX_LANES + 1
_CONTRIBUTORS = 3  # where the sums of a name tell how many ranks contributed

_NO_SUMS = (0.0,) * _SUMS_PER_NAME
_NO_MAXIMA = (NOTHING,) * _PER_NAME


class Header(NamedTuple):
    """What a rank says beside its numbers; reduced by maximum, so that what holds for any rank holds for all.

    Args:
        last_counted: Of the position that it proposes for this round, as `Place.counted`; a pair with the next one.
        first_counted: The same, negated.
        last_step: And its step; a pair with the next one.
        first_step: The same, negated.
        origin: As in `Cell`, of what it contributes in a round for one row.
        unknown: Whether it has names that are not agreed on.
        busy: Whether it goes on: not, if it closes and has nothing left.
        give_up_new: Up to which round it gives up cells of names that were never finished.
        give_up_all: And all cells.
        more: Whether it has more to contribute.
        regroup: Whether the ranks that take part are to be agreed on anew.
        speaking: Whether it may contribute more: not, if it closes or pauses and has nothing left.
        backlog: How many more rows wait on it.
        mingled: Whether it logs from several threads or processes, each of which has an order of its own.
    """

    last_counted: float = NOTHING
    first_counted: float = NOTHING
    last_step: float = NOTHING
    first_step: float = NOTHING
    origin: float = NOTHING
    unknown: float = NOTHING
    busy: float = NOTHING
    give_up_new: float = NOTHING
    give_up_all: float = NOTHING
    more: float = NOTHING
    regroup: float = NOTHING
    speaking: float = NOTHING
    backlog: float = NOTHING
    mingled: float = NOTHING

    def proposing(self, place: Place, **others: float) -> Header:
        """This header with a proposed position, and other fields."""
        counted, step = map(float, place)
        return self._replace(last_counted=counted, first_counted=-counted, last_step=step, first_step=-step, **others)

    def proposed(self) -> tuple[Place | None, tuple[int, ...]]:
        """The position that all proposed who proposed one; else what the next proposals have to begin with."""
        if self.last_counted == NOTHING:
            return None, ()
        counted, step = int(-self.first_counted), int(-self.first_step)
        if self.last_counted != counted:
            return None, (counted,)
        return (Place(counted, step), ()) if self.last_step == step else (None, (counted, step))


_HEADER = len(Header._fields)


def header_of(maxima: Sequence[float]) -> Header:
    """The header of a reduced second list."""
    return Header._make(maxima[:_HEADER])


# Rounds for one row


def row_lists(header: Header, names: Names, due: Mapping[str, Contributed], spreads: Spreads) -> Lists:
    """A rank's lists in a round for one row, given what it contributes by name."""
    sums: list[float] = []
    maxima: list[float] = [*header]
    for name in names:
        contributed = due.get(name)
        if contributed is None:
            sums += _NO_SUMS
            maxima += _NO_MAXIMA
        else:
            summed, largest = contributed.totals.lanes()
            sums += summed
            sums.append(0.0)
            maxima += largest
            maxima += (contributed.occurrence, -contributed.occurrence, NOTHING)
    for value in spreads.next():
        if value.spread is not None:
            squares, largest_at = _spread_lanes(names, value)
            sums[squares], maxima[largest_at] = spreads.part(value)
    return sums, maxima


def read_row(
    names: Names, sums: Sequence[float], maxima: Sequence[float]
) -> Iterator[tuple[str, int, int, Sequence[float], Sequence[float]]]:
    """Of names to which ranks contributed: the first and the last occurrence, and the lanes of its totals."""
    header = _HEADER
    for start, name in zip(range(0, len(sums), _SUMS_PER_NAME), names, strict=True):
        if sums[start + _CONTRIBUTORS]:
            lanes = maxima[header : header + MAX_LANES]
            last, first = maxima[header + MAX_LANES], -maxima[header + MAX_LANES + 1]
            yield name, int(first), int(last), sums[start : start + SUM_LANES], lanes
        header += _PER_NAME


def read_row_spreads(names: Names, values: Iterable[Finished], sums: Sequence[float], maxima: Sequence[float]) -> None:
    """Complete the spreads of values that the round had room for."""
    for value in values:
        if value.spread is not None:
            squares, largest_at = _spread_lanes(names, value)
            _complete(value, sums[squares], maxima[largest_at])


def _spread_lanes(names: Names, value: Finished) -> tuple[int, int]:
    """Where the two lanes of a value's spread are in the two lists."""
    index = names[value.key.name].index
    return _SUMS_PER_NAME * index + SUM_LANES, _HEADER + _PER_NAME * index + MAX_LANES + 2


def _complete(value: Finished, squares: float, largest_at: float) -> None:
    if value.spread is not None:
        value.spread.squares = squares
        value.spread.largest_at = -1 if largest_at == NOTHING else int(-largest_at)


# Rounds for many rows


def batch_lists(
    header: Header, batch: Sequence[Key], contributions: Mapping[Key, Contributed], spreads: Spreads
) -> Lists:
    """A rank's lists in a round for many rows, given what it contributes by cell."""
    sums: list[float] = []
    maxima: list[float] = [*header]
    for key in batch:
        contributed = contributions.get(key)
        if contributed is None:
            sums += _NO_SUMS[:SUM_LANES]
            maxima += _NO_MAXIMA[:_PER_CELL]
        else:
            summed, largest = contributed.totals.lanes()
            sums += summed
            maxima += largest
            maxima.append(contributed.origin)
    for value in spreads.awaiting:
        squares, largest_at = spreads.part(value)
        sums.append(squares)
        maxima.append(largest_at)
    return sums, maxima


def read_batch(batch: Sequence[Key], sums: Sequence[float], maxima: Sequence[float]) -> list[Received]:
    """What all ranks together contributed to the cells of a round for many rows."""
    received = []
    start, header = 0, _HEADER
    for key in batch:
        totals = Totals.from_lanes(sums[start : start + SUM_LANES], maxima[header : header + MAX_LANES])
        if totals.contributors:
            received.append(Received(key, totals, maxima[header + MAX_LANES]))
        start, header = start + SUM_LANES, header + _PER_CELL
    return received


def read_batch_spreads(
    batch: Sequence[Key], values: Iterable[Finished], sums: Sequence[float], maxima: Sequence[float]
) -> None:
    """Complete the spreads of all values that awaited theirs."""
    for number, value in enumerate(values):
        start, header = SUM_LANES * len(batch), _HEADER + _PER_CELL * len(batch)
        _complete(value, sums[start + number], maxima[header + number])
