"""The rows that wait for ranks, which of them a round finishes, and those that may still be corrected. Pure.

A row waits for the ranks that usually log its names (`contributors`), and is written once, with all its cells. Who is
still missing when patience runs out is noted, and the row is flagged. What comes later corrects the row: it is written
again, as a whole.

The *owner* of a cell is the call of the lowest rank that contributed to it. A row holds the cells of one owner's call,
and what a higher rank adds to it (`_homes`): what its call has besides cells of calls that stand in this one row, or,
with a step, after such a cell. It does not need an identity of its own.

States of a row: *open*, from its first cell until all its cells are written; *remembered* while some rank of the unit
may still add to it (`Memory`); *forgotten*. A row to which all ranks have contributed is forgotten at once. A value for
a row that was forgotten earlier is too late, and not written.

The rules, with the reasons and simulations of them, are those of a reference model; `tests/support/row_model.py` judges
their results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.contributors import NEVER, NOBODY, Contributors, Patience, Ranks
from dist_wandb.exchange.protocol.lanes import lanes_of, number_at
from dist_wandb.exchange.protocol.memory import Cell, Known, Memory, Owner, Row

_MOST_WAITING = 64  # young rows that a round finds waiting, until it looks at no further ones


class Table:
    """The replicated state of a unit's rows."""

    def __init__(self, size: int, remembered: int) -> None:
        self.ranks: Contributors = Contributors(size)
        self.round: int = 0  # how many so far
        self.serial: int = 0  # how many calls were taken so far; those that all ranks made count once
        self.names: dict[str, int] = {}  # that the ranks have agreed on, and their numbers
        self.axes: dict[str, None] = {}  # those that are x axes of the user
        self.taken: dict[int, int] = {}  # by rank: how many of its calls were taken
        self.counts: dict[str, dict[int, int]] = {}  # by name and closing rank: as in `calls.Offer`
        self.memory: Memory = Memory(size, remembered)  # rows that were written
        self.cells: dict[Key, Cell] = {}  # those that wait
        self.rows: dict[Owner, dict[str, Key]] = {}  # the cells of each row, by name
        self.open: dict[Owner, None] = {}  # rows with something that is not written, in the order in which they came
        self.calls: dict[Owner, Known] = {}  # those that own cells, or did, or have x axes
        self.checked: int = NEVER  # the version of the ranks as of which all open rows were checked

    def unwritten(self) -> Iterator[Key]:
        rows, cells = self.rows, self.cells
        return (key for row in self.open for key in rows[row].values() if cells[key].shown != cells[key].ranks)

    def uneven(self) -> dict[str, dict[int, int]]:
        """Return the counts of names, but no x axes, that differ or are 0."""
        counts = {name: of_name for name, of_name in self.counts.items() if name not in self.axes}
        return {name: one for name, one in counts.items() if 0 in one.values() or len({*one.values()}) > 1}

    # Contributions

    def enter(self, call: Owner, known: Known, ranks: Ranks) -> None:
        """Add equal calls of some ranks, the lowest of which owns them, and find the rows of all cells concerned."""
        self.serial += 1
        cells, names = self.cells, dict[int, list[str]]()
        for key in known.keys:
            names.setdefault(self._opened(key).serial, []).append(key.name)
        self.calls[call] = known
        concerned, beside = dict.fromkeys(known.keys), dict[tuple[Owner, Owner], None]()
        for key in known.keys:
            cell = cells[key]
            cell.ranks |= ranks
            cell.calls[call[0]] = call[1]
            if cell.row is not None:
                beside[cell.owner, cell.row] = None
            if cell.owner[0] == NEVER or call[0] < cell.owner[0]:
                cell.owner = call
        for owner, row in beside:  # what stands beside a cell may have another home now
            of_call = self.calls[owner].keys if owner in self.calls else ()
            concerned.update(dict.fromkeys([*filter(cells.__contains__, of_call), *self.rows[row].values()]))
        of_owner: dict[Owner, list[Key]] = {}
        for key in concerned:
            of_owner.setdefault(cells[key].owner, []).append(key)
        for owner in sorted(of_owner):  # a row of lower ranks is complete when others join it
            homes = self._homes(owner) if owner in self.calls else {}
            for key in of_owner[owner]:
                self._place(key, cells[key], homes.get(key) or cells[key].row or call)
        changed = [cells[key].row for key in concerned if cells[key].shown != cells[key].ranks]
        self.open.update((row, None) for row in changed if row in self.rows)
        if call not in of_owner and not known.axes:
            del self.calls[call]
        for serial, of_serial in names.items():
            self.ranks.note(of_serial, ranks, serial, self.round, known.step)

    def _opened(self, key: Key) -> Cell:
        """Return the cell of a key, to which ranks contribute now."""
        if (row := self.memory.index.get(key)) is not None:
            self.recall(row)
        if (cell := self.cells.get(key)) is None:
            cell = self.cells[key] = Cell(self.serial, self.round, stale=self.memory.is_stale(key))
        elif cell.shown is not None:
            cell.born = self.round  # it is opened again
        cell.joined = self.serial
        return cell

    def recall(self, home: Owner) -> None:
        """Make cells of a row that is remembered."""
        row, ranks, lacks = self.memory.pop(home)
        keys = row.cells()
        self.calls.setdefault(home, Known(row.step, row.x, row.axes, keys))
        of_row = self.rows.setdefault(home, {})
        for index, key in enumerate(keys):
            if key not in self.cells and key.name not in of_row:
                those, lowest = ranks[index], min(ranks[index])
                owner = home if lowest == home[0] else (lowest, NEVER)  # which of its calls, is not remembered
                total = number_at(*row.lanes, index, len(keys))
                cell = Cell(row.serial, self.round, total, those, dict([home]), owner, home, those, home)
                cell.lacks, cell.flagged = lacks[index], any(lacks)
                self.cells[key], of_row[key.name] = cell, key
        if not of_row:
            del self.rows[home]

    def _homes(self, call: Owner) -> Mapping[Key, Owner]:
        """Return the rows in which the cells stand that a call owns.

        It is the row of the calls of lower ranks with which it shares cells, if that is one row, and it is the only
        partner of these calls on its rank, or has a step, at which a row may come in parts; otherwise a row of its own,
        also if the lower rank gives one of the names in another call, as it usually does, or has another cell of one.
        A call with a step may be several that were joined, and be shared with several rows: then each cell stands with
        the shared one before it.
        """

        def is_partner(lower: Owner) -> bool:
            """Return whether the rank shares with a call of a lower rank only this call."""
            keys = self.calls[lower].keys if lower in self.calls else ()
            shared = [
                self.cells[key].calls.get(call[0])
                for key in keys
                if key in self.cells and call[0] in self.cells[key].ranks
            ]
            return shared.count(call[1]) == len(shared)

        cells = [(key, self.cells[key]) for key in self.calls[call].keys if key in self.cells]
        own = [key for key, cell in cells if cell.owner == call]
        lower = [cell for _, cell in cells if cell.owner[0] < call[0]]
        has_step, rows = self.calls[call].step is not None, {cell.row for cell in lower}
        owners = {cell.owner for cell in lower}
        if not rows or not (has_step or (len(rows) == 1 and all(map(is_partner, owners)))):
            return dict.fromkeys(own, call)
        homes, row = dict[Key, Owner](), lower[0].row
        for key, cell in cells:
            if cell.owner == call:
                homes[key] = row or call
            elif cell.owner[0] < call[0]:
                row = cell.row
        apart = {
            home
            for key, home in ((key, homes[key]) for key in own)
            if self.rows.get(home, {}).get(key.name, key) != key or home[0] in self.ranks.usual.get(key.name, NOBODY)
        }
        return {key: call if home in apart else home for key, home in homes.items()}

    def _place(self, key: Key, cell: Cell, row: Owner) -> None:
        if row != cell.row:
            if cell.row is not None:
                before = self.rows[cell.row]
                if before.get(key.name) == key:
                    del before[key.name]
                if not before:
                    del self.rows[cell.row]
                    self.open.pop(cell.row, None)
            cell.row = row
            self.rows.setdefault(row, {})[key.name] = key

    # Ranks come and go

    def resize(self, members: Ranks, lost: Ranks) -> None:
        is_new, joined = not lost <= self.ranks.lost.keys(), members - self.ranks.members
        self.ranks.resize(members, lost, self.round)
        if is_new:  # rows were written before it was known that a lost rank logs their names
            for home in self.memory:
                row, ranks, _ = self.memory.row(home)
                if any(self.ranks.lost_before(*one, row.serial) for one in zip(row.names, ranks, strict=True)):
                    self.recall(home)
            for key, cell in self.cells.items():
                cell.lacks |= self.ranks.lost_before(key.name, cell.ranks, cell.serial)
            self._reopen_changed()
        if not joined <= self.taken.keys():  # who logs what was learnt from too few ranks
            self.ranks.usual.clear()
            self.ranks.version += 1

    def leave(self, ranks: Ranks) -> None:
        """Record that ranks contribute nothing more; rows that are flagged only for them are written once more."""
        if not ranks <= self.ranks.closed:
            self.ranks.closed |= ranks
            self.ranks.version += 1
            for row in self.memory.flagged_for(self.ranks.closed):
                self.recall(row)
            self._reopen_changed()

    def _reopen_changed(self) -> None:
        for row in [row for row in self.rows if row not in self.open]:
            if self.unwritten_in(row):
                self.open[row] = None
            else:
                self.close(row)

    # Rows

    def with_axes(self, row: Owner) -> Known:
        """Return the call of a row's owner, with x axes that only the calls of higher ranks have."""
        for call in sorted({call for key in self.rows[row].values() for call in self.cells[key].calls.items()}):
            known, other = self.calls[row], self.calls.get(call)
            if other is not None and not other.axes.keys() <= known.axes.keys():
                self.calls[row] = known._replace(axes={**other.axes, **known.axes})
        return self.calls[row]

    def unwritten_in(self, row: Owner) -> list[Key]:
        """Return the cells for which a row is to be written: their contributors, or its flag, have changed."""
        cells, keys = self.cells, self.rows[row].values()
        found = [key for key in keys if cells[key].shown != cells[key].ranks]
        if found:
            return found
        lacks = any(self.missing(cells[key]) for key in keys)
        return [key for key in keys if cells[key].flagged != lacks]

    def missing(self, cell: Cell) -> Ranks:
        """Return the ranks that a cell lacks; who left without giving it has nothing to give."""
        return cell.lacks - cell.ranks - self.ranks.closed if cell.lacks else NOBODY

    def close(self, row: Owner) -> None:
        if row in self.memory:
            self.recall(row)
        known = self.calls[row]
        kept = [(key, self.cells.pop(key)) for key in self.rows.pop(row).values()]
        self.open.pop(row, None)
        for call in {row, *(call for _, cell in kept for call in (cell.owner, *cell.calls.items()))}:
            if call in self.calls and not any(key in self.cells for key in self.calls[call].keys):
                del self.calls[call]
        names, _, occurrences = zip(*(key for key, _ in kept), strict=True)
        cells = [cell for _, cell in kept]
        ranks, lacks = [cell.ranks for cell in cells], [self.missing(cell) for cell in cells]
        serial, lanes = min(cell.serial for cell in cells), lanes_of([cell.number for cell in cells])
        written = Row(names, occurrences, known.step, known.x, lanes, known.axes, (), serial=serial)
        self.memory.add(row, written, ranks, lacks)


class Conclusion:
    """The end of one round, in which ranks have contributed to the cells `touched`."""

    def __init__(self, table: Table, touched: Collection[Key], patience: Patience, rank: int) -> None:
        self.gave_up: list[Key] = []  # cells that others give up to wait for this rank
        self.too_late: list[Key] = []  # cells that it gave after their row was forgotten
        self._rank = rank
        self._table = table
        self._ranks = table.ranks
        self._touched = touched
        self._patience = patience
        # the contributors to some cell of a row, and the last serial
        self._of_rows: dict[Owner, tuple[Ranks, int]] = {}

    def rows(self) -> Iterator[tuple[Owner, Row]]:
        """Yield the finished rows with their owners, in the order in which they were opened."""
        while ready := self._ready():
            for _, row in sorted(ready):
                yield from ((row, written) for written in self._written(row))
            if self._ranks.version == self._table.checked:
                break

    def _ready(self) -> list[tuple[int, Owner]]:
        """Return the open rows that wait for nobody any more, and the serials of their first cells.

        Ranks pass rows in the order in which these were opened, so those to which they have contributed are checked,
        and the oldest ones, until some wait that are not overdue; all, if ranks come, go, or log other names.
        """
        table, patience, ready = self._table, self._patience, dict[Owner, int]()
        touched = {table.cells[key].row for key in self._touched if key in table.cells}
        overdue = max(patience.of_new, patience.of_all)
        while True:
            checks_all = patience.everything or self._ranks.version != table.checked
            table.checked, waiting = self._ranks.version, 0
            for row in [row for row in table.open if row not in ready]:
                if waiting >= _MOST_WAITING and not checks_all and row not in touched:
                    continue
                keys = table.unwritten_in(row)
                if not keys:  # its flag has changed twice
                    table.close(row)
                    continue
                is_crowded = len(table.open) - len(ready) > patience.most_open
                if not (patience.everything or is_crowded or not any(self._waits(key) for key in keys)):
                    waiting += all(table.cells[key].born > overdue for key in table.rows[row].values())
                    continue
                awaited = [self._awaited(key, table.cells[key]) for key in keys]  # before one is given up
                for key, (rest, is_long) in zip(keys, awaited, strict=True):
                    self._give_up(key, rest, is_long=is_long)
                ready[row] = min(table.cells[key].serial for key in table.rows[row].values())
            if self._ranks.version == table.checked:
                return [(serial, row) for row, serial in ready.items()]

    def _awaited(self, key: Key, cell: Cell) -> tuple[Ranks, bool]:
        axes, beside = self._table.axes, NOBODY
        if key.name in axes and cell.row is not None and not self._table.rows[cell.row].keys() <= axes.keys():
            return NOBODY, False  # it has become an x axis since, which is no cell of the later calls
        if key.name not in self._ranks.usual and cell.row is not None:
            # not the ranks that have logged other values of its row, and then another call
            if cell.row not in self._of_rows:
                others = [self._table.cells[other] for other in self._table.rows[cell.row].values()]
                of_others = NOBODY.union(*{other.ranks for other in others}), max(other.serial for other in others)
                self._of_rows[cell.row] = of_others
            ranks, newest = self._of_rows[cell.row]
            beside = self._ranks.latest.later(ranks - cell.ranks, newest)
        return self._ranks.awaited(key.name, cell.ranks, cell.serial, key.step, beside=beside)

    def _waits(self, key: Key) -> bool:
        cell = self._table.cells[key]
        rest, is_long = self._awaited(key, cell)
        if not rest or (cell.born <= self._patience.of_all and not self._patience.behind):
            return False
        return is_long or cell.born > self._patience.of_new or (0 in rest and self._patience.needs_primary(key.name))

    def _give_up(self, key: Key, rest: Ranks, *, is_long: bool) -> None:
        """Finish a cell, for which these ranks are still awaited: note who is missing."""
        cell = self._table.cells[key]
        cell.lacks |= self._ranks.lacking(key.name, cell.ranks, cell.born)
        if self._patience.everything or not rest or (cell.stale and cell.shown is None):
            return
        if not is_long:
            self._ranks.give_up_new(rest)
            return
        self.gave_up += (key,) if self._rank in rest else ()
        cell.lacks |= rest
        self._ranks.give_up(key.name, rest, cell.born)

    def _written(self, row: Owner) -> Iterator[Row]:
        """Yield a row as it is to be written, and remember it."""
        known, here = self._table.with_axes(row) if self._table.axes else self._table.calls[row], []
        for key in self._table.rows[row].values():
            cell = self._table.cells[key]
            usual = self._ranks.usual.get(key.name, NOBODY) & self._ranks.members
            if cell.stale and cell.shown is None and usual - cell.ranks - self._ranks.silent:
                self.too_late += (key,) if self._rank in cell.ranks else ()
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
            serial = min(cell.serial for _, cell in here)
            place = names, occurrences, known.step, known.x
            joined = () if corrects else [cell.joined for _, cell in here]
            yield Row(*place, lanes, known.axes, counts, len(missing), corrects, serial=serial, joined=joined)
        self._table.close(row)
