"""Which rows are finished in a round: those that wait for nobody any more, or have waited long enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Ranks
from dist_wandb.exchange.protocol.lanes import lanes_of
from dist_wandb.exchange.protocol.placing import Cell, Owner
from dist_wandb.exchange.protocol.table import Row, Table

_FEW = 64  # open rows that are all checked in each round


class Patience(NamedTuple):
    """What rows wait for in a round."""

    of_new: float  # rounds up to which cells of names that were never written have waited long enough
    of_all: float  # the same for all cells
    everything: bool  # whether all ranks pause or close: nothing is waited for
    behind: bool  # whether some rank has more waiting than it could offer: nobody is given up now
    most_open: int  # how many rows may be open
    needs_primary: Callable[[str], bool]  # see `Rounds`


class Conclusion:
    """The end of one round, in which ranks have contributed to the cells `touched`."""

    def __init__(self, table: Table, touched: Collection[Key], patience: Patience) -> None:
        self._table = table
        self._placing = table.placing
        self._ranks = table.ranks
        self._touched = touched
        self._patience = patience

    def rows(self) -> Iterator[tuple[Owner, Row]]:
        """Yield the finished rows with their owners, in the order in which they were opened."""
        while ready := self._ready():
            for _, row in sorted(ready):
                yield from ((row, written) for written in self._written(row))
            if self._ranks.version == self._placing.checked:
                break
        self._table.memory.forget(self._table.names)

    def _ready(self) -> list[tuple[int, Owner]]:
        """Return the finished open rows, each with its serial."""
        ready: dict[Owner, int] = {}
        rows = self._candidates()
        while rows:
            self._placing.checked = self._ranks.version
            for row in rows:
                keys = self._table.unwritten_in(row)
                if not keys:  # its flag has changed twice
                    self._table.close(row)
                    continue
                is_crowded = len(self._placing.open) - len(ready) > self._patience.most_open
                if not (self._patience.everything or is_crowded or not any(self._waits(key) for key in keys)):
                    continue
                awaited = [self._awaited(key, self._placing.cells[key]) for key in keys]  # before one is given up
                for key, (rest, is_long) in zip(keys, awaited, strict=True):
                    self._give_up(key, rest, is_long=is_long)
                ready[row] = min(self._placing.cells[key].serial for key in self._placing.rows[row].values())
            if self._ranks.version == self._placing.checked:
                break
            rows = [row for row in self._placing.open if row not in ready]  # ranks may not be awaited any more
        return [(serial, row) for row, serial in ready.items()]

    def _candidates(self) -> list[Owner]:
        """Return open rows that may be finished: touched ones, those that ranks have passed, and overdue ones."""
        cells, is_other = self._placing.cells, self._ranks.version != self._placing.checked
        if self._patience.everything or is_other or len(self._placing.open) <= min(_FEW, self._patience.most_open):
            return list(self._placing.open)
        touched = [(key.name, cells[key]) for key in self._touched if key in cells]
        rows = {cell.row for _, cell in touched}
        newest: dict[str, int] = {}
        for name, cell in touched:
            newest[name] = max(newest.get(name, NEVER), cell.serial)
        for name, serial in newest.items():
            for key in self._placing.by_name.get(name, ()):
                cell = cells[key]
                if cell.serial >= serial:
                    break
                if not self._ranks.awaited(name, cell.ranks, cell.serial)[0]:
                    rows.add(cell.row)
        overdue = max(self._patience.of_new, self._patience.of_all)
        spare = len(self._placing.open) - self._patience.most_open
        for number, row in enumerate(self._placing.open):
            if number >= spare and all(cells[key].born > overdue for key in self._placing.rows[row].values()):
                break
            rows.add(row)
        return [row for row in self._placing.open if row in rows]

    def _awaited(self, key: Key, cell: Cell) -> tuple[Ranks, bool]:
        axes, beside = self._table.axes, NOBODY
        if key.name in axes and cell.row is not None and not self._placing.rows[cell.row].keys() <= axes.keys():
            return NOBODY, False  # it has become an x axis since, which is no cell of the later calls
        if key.name not in self._ranks.usual and cell.row is not None:
            # not the ranks that have logged other values of its row, and then another call
            others = [self._placing.cells[other] for other in self._placing.rows[cell.row].values()]
            givers = NOBODY.union(*{other.ranks for other in others}) - cell.ranks
            beside = self._ranks.passed(givers, max(other.serial for other in others)) if givers else NOBODY
        return self._ranks.awaited(key.name, cell.ranks, cell.serial, beside=beside)

    def _waits(self, key: Key) -> bool:
        cell = self._placing.cells[key]
        rest, is_long = self._awaited(key, cell)
        if not rest or (cell.born <= self._patience.of_all and not self._patience.behind):
            return False
        return is_long or cell.born > self._patience.of_new or (0 in rest and self._patience.needs_primary(key.name))

    def _give_up(self, key: Key, rest: Ranks, *, is_long: bool) -> None:
        """Finish a cell, for which these ranks are still awaited: note who is missing."""
        cell = self._placing.cells[key]
        cell.lacks |= self._ranks.lacking(key.name, cell.ranks, cell.born)
        if self._patience.everything or not rest or (cell.stale and cell.shown is None):
            return
        if not is_long:
            self._ranks.give_up_new(rest)
            return
        self._table.told.append(("gave up", key, rest))
        cell.lacks |= rest
        self._ranks.give_up(key.name, rest, cell.born, self._table.round)

    def _written(self, row: Owner) -> Iterator[Row]:
        """Yield a row as it is to be written, and remember it."""
        known, here = self._placing.calls[row], []
        for key in self._placing.rows[row].values():
            cell = self._placing.cells[key]
            if cell.stale and cell.shown is None and self._ranks.others(key.name, cell.ranks):
                self._table.told.append(("too late", key, cell.ranks))
                cell.shown, cell.at = cell.ranks, row
            elif cell.at in (None, row) or cell.shown != cell.ranks or cell.flagged:  # not elsewhere, and right
                here.append((key, cell))
        if here:
            order = {key: index for index, key in enumerate(known.keys)}
            here.sort(key=lambda one: order.get(one[0], len(order)))
            missing = NOBODY.union(*(self._table.missing(cell) for _, cell in here))
            corrects = any(cell.shown is not None for _, cell in here)
            names, _, occurrences = zip(*(key for key, _ in here), strict=True)
            lanes = lanes_of([cell.number for _, cell in here])
            counts = tuple(len(cell.ranks) for _, cell in here)
            for key, cell in here:
                cell.shown, cell.at, cell.flagged = cell.ranks, row, bool(missing)
                self._ranks.note_usual((key.name,), cell.ranks)
            yield Row(names, occurrences, known.step, known.x, lanes, known.axes, counts, len(missing), corrects)
        self._table.close(row)
