"""The plan of one round: the calls that it takes, given what all ranks offer, and their numbers in its lists. Pure.

The lists of a round hold the rows that are complete at once, then the cells of the calls that go into the table
(`choosing`). A value of the user's x axis is that of one call, the owner's: it has one place in the sums, which only
that rank fills; behind the row's sums, or before those of all cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from dist_wandb.exchange.protocol.calls import Call, Intent, Key, Offer, parties_of
from dist_wandb.exchange.protocol.choosing import Segment, Taken, chosen, matched
from dist_wandb.exchange.protocol.contributors import NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import MAXIMA, NO_NUMBER, NOTHING, SUMS, Lanes, Number, number_at
from dist_wandb.exchange.protocol.placing import Known, Owner, Remembered
from dist_wandb.exchange.protocol.table import Row, Table


class Plan:
    """The plan of one round, for one rank, which has offered `calls`."""

    def __init__(self, table: Table, offers: Sequence[tuple[Ranks, Offer]], rank: int, calls: Sequence[Call]) -> None:
        self.offers = offers
        self.differing: dict[str, None] = {}  # from `apply`: x axes whose values differ between the ranks of a row
        self._table = table  # not changed before `apply`
        self._rank = rank
        self._calls = calls
        axes = frozenset(table.axes).union(*(offer.new_axes for _, offer in offers))
        self._parties = parties_of(offers)
        self._party = next((party for party in self._parties if rank in party.ranks), None)
        self._segments = matched(table, self._parties, axes)
        self._chosen = chosen(table, self._parties, axes)
        # The cells of the table to which ranks contribute.
        self.touched: dict[Key, None] = {key: None for one in self._chosen for key in one.cells}

    @property
    def taken(self) -> int:
        return self._party.taken if self._party else 0

    @property
    def has_numbers(self) -> bool:
        return any(one.rows.names for one in self._segments) or bool(self.touched)

    @property
    def takes_all(self) -> bool:
        """Whether nothing waits on any rank after the round."""
        return not any(party.left for party in self._parties) and not any(one.more for _, one in self.offers)

    @property
    def leaving(self) -> Ranks:
        """The ranks that contribute nothing more after the round."""
        closing = (ranks for ranks, one in self.offers if one.intent is Intent.CLOSING and not one.more)
        return NOBODY.union(*closing) - NOBODY.union(*(party.ranks for party in self._parties if party.left))

    @property
    def own_chosen(self) -> Iterator[tuple[int, Taken]]:
        """The calls of this rank that go into the table, with their places, as from `apply`."""
        return ((place, one) for place, one in enumerate(self._chosen) if one.party is self._party)

    # The lists

    def pack(self) -> Lanes:
        sums: list[float] = []
        maxima: list[float] = []
        for segment in self._segments:
            self._pack_segment(segment, sums, maxima)
        self._pack_chosen(sums, maxima)
        return sums, maxima

    def _pack_segment(self, segment: Segment, sums: list[float], maxima: list[float]) -> None:
        lowest, rows = self._party.lowest if self._party else -1, segment.rows
        names, slots, start = len(rows.names), len(segment.axes), segment.starts.get(lowest)
        if start is None:
            sums += [0.0] * ((SUMS * names + slots) * rows.number)
            maxima += [NOTHING] * (MAXIMA * names * rows.number)
            return
        places, is_owner = segment.places[lowest], segment.owner == self._rank
        for call in self._calls[start : start + rows.number]:
            is_whole = places is None and len(call.names) == names
            own_sums, own_maxima = call.lanes if is_whole else _placed(call, places, names)
            sums += own_sums
            maxima += own_maxima
            if slots:
                own = [_of_axis(number_at(own_sums, own_maxima, index, names)) for index in segment.axes]
                sums += own if is_owner else [0.0] * slots

    def _pack_chosen(self, sums: list[float], maxima: list[float]) -> None:
        mine: dict[Key, Number] = {}
        for one in self._chosen:
            if one.party is not self._party:
                sums += [0.0] * len(one.axes)
                continue
            call = self._calls[one.number]
            numbers = [number_at(*call.lanes, at, len(call.names)) for at in range(len(call.names))]
            mine.update((key, numbers[at]) for key, at in one.cells.items())
            is_owner = one.party.lowest == self._rank
            sums += [_of_axis(numbers[at]) if is_owner else 0.0 for at in one.axes.values()]
        for key in self.touched:
            number = mine.get(key, NO_NUMBER)
            sums += number[:SUMS]
            maxima += number[SUMS:]

    def apply(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[Row], dict[Owner, int]]:
        """Apply the reduced lists; return the complete rows, and the places of the calls in the table, in its order."""
        rest = iter(sums), iter(maxima)
        rows = [row for segment in self._segments for row in self._rows_of(segment, *rest)]
        table, taken, places = self._table, self._table.taken, dict[Owner, int]()
        calls = table.placing.calls
        for place, one in enumerate(self._chosen):
            axes, lowest = _axes(one.axes, rest[0]), one.party.lowest
            known, owner = Known(one.step, one.x, axes, list(one.cells)), (lowest, taken.get(lowest, 0) + one.number)
            for other in {table.cells[key].owner for key in known.keys if key in table.cells}:
                before = calls[other].axes if other in calls else {}
                self.differing.update((name, None) for name, value in axes.items() if before.get(name, value) != value)
            places[owner] = place
            table.enter(owner, known, one.party.ranks)
        for key in self.touched:
            cell = table.cells[key]
            cell.number = cell.number.plus(Number(*islice(rest[0], SUMS), *islice(rest[1], MAXIMA)))
        for party in self._parties:
            if party.taken:
                taken.update((rank, taken.get(rank, 0) + party.taken) for rank in party.ranks)
        return rows, places

    def _rows_of(self, segment: Segment, sums: Iterator[float], maxima: Iterator[float]) -> Iterator[Row]:
        table, cells, ranks = self._table, segment.cells, segment.ranks
        names, counts = segment.rows.names, tuple(map(len, ranks))
        missing, wide, high = len(NOBODY.union(*segment.lacks.values())), SUMS * len(names), MAXIMA * len(names)
        is_without_axes = len(cells) == len(names)
        start = segment.starts.get(self._party.lowest) if self._party else None
        owner, first = segment.owner, table.taken.get(segment.owner, 0) + segment.starts[segment.owner]
        for index in range(segment.rows.number):
            table.serial += 1
            lanes = [*islice(sums, wide)], [*islice(maxima, high)]
            for at in segment.axes:
                number = number_at(*lanes, at, len(names))
                if number.largest > -number.minus_smallest:
                    self.differing[names[at]] = None
            axes = _axes([names[at] for at in segment.axes], sums) if segment.axes else {}
            _, occurrences, step, _, x, *_ = segment.rows.from_call(index)
            row = Row(names, occurrences, step, x, lanes, axes, counts, missing)
            if not is_without_axes:
                row = _without_axes(row, cells)
            if segment.lacks:
                lacks = [segment.lacks.get(cell, NOBODY) for cell in cells]
                givers = [ranks[cell] for cell in cells]
                table.memory.add(
                    Remembered((owner, first + index), *row[:4], row.axes, table.serial, givers, lacks, row.lanes)
                )
            kept = None if start is None else self._calls[start + index].own
            if names or kept is not None:
                yield row if kept is None else row._replace(own=(kept,))
        by_ranks: dict[Ranks, list[str]] = {}
        for cell in cells:
            by_ranks.setdefault(ranks[cell], []).append(names[cell])
        for those, of_those in by_ranks.items():
            table.ranks.note(of_those, those, table.serial, table.round)
            table.ranks.note_usual(of_those, those)


def _placed(call: Call, places: Sequence[int] | None, names: int) -> Lanes:
    """Return the lanes of a call among more names."""
    sums, maxima = [0.0] * (SUMS * names), [NOTHING] * (MAXIMA * names)
    own_sums, own_maxima, count = *call.lanes, len(call.names)
    for index, place in enumerate(range(count) if places is None else places):
        sums[place::names] = own_sums[index::count]
        maxima[place::names] = own_maxima[index::count]
    return sums, maxima


def _without_axes(row: Row, cells: Sequence[int]) -> Row:
    names, (sums, maxima) = len(row.names), row.lanes
    return row._replace(
        names=tuple([row.names[cell] for cell in cells]),
        occurrences=tuple([row.occurrences[cell] for cell in cells]),
        lanes=(
            [sums[lane * names + cell] for lane in range(SUMS) for cell in cells],
            [maxima[lane * names + cell] for lane in range(MAXIMA) for cell in cells],
        ),
        ranks=tuple([row.ranks[cell] for cell in cells]),
    )


def _of_axis(number: Number) -> float:
    return number.plain if number.given else math.nan  # what is sent for no value


def _axes(names: Iterable[str], slots: Iterator[float]) -> dict[str, float]:
    """Return the values of the next x axes, as they are written."""
    values = [(name, next(slots)) for name in names]
    return {name: int(value) if value.is_integer() else value for name, value in values if not math.isnan(value)}
