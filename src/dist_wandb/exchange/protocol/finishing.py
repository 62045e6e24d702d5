"""When cells are finished. Pure, and equal on all ranks: what decides was reduced over them.

An open cell is finished when

- all ranks contributed, or as many as did when the name was finished last (*complete*);
- all ranks have *passed* it: a later cell of its name is complete, because a rank logs a name in order; or, for a name
  that was never finished, all ranks have contributed to one later row. So what rank 0 alone logs beside the others is
  in their row from the second time on;
- a rank has waited long enough for others (*gave up*): a short time for names that were never finished, a long one for
  those of which it is known how many ranks contribute;
- all ranks pause or close.

Where a rank logs from several threads or processes (*interleaved*; workers of a DataLoader) its order proves nothing: then
what would be passed waits for patience. A cell of a metric is not given up before the primary has contributed to it,
because nobody else can compute it, and by then the states of others may be gone with them.

Invariants: cells of one round are finished in the order in which they were opened; a cell is finished once for each
time that it was opened; the fast path at the start of `conclude` leads to what the rules lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from dist_wandb.exchange.protocol.cells import CALLS, NOTHING, Cell, Contributed, Finished, Key
from dist_wandb.exchange.protocol.ledger import Ledger, row_of
from dist_wandb.exchange.protocol.wire import Header


class _Ready(NamedTuple):
    """A cell that is to be finished.

    Args:
        key: The cell.
        gave_up: Whether only because patience ran out with ranks that usually contribute.
        sure: Whether it is known that the silent ranks have passed it.
        if_complete: Whether only if it still is complete when those before it are finished.
    """

    key: Key
    gave_up: bool = False
    sure: bool = False
    if_complete: bool = False


Conclusion = tuple[tuple[Finished, ...], tuple[Key, ...]]  # values, and cells whose other contributions are lost


class Finishing:
    """Finishes the cells of a ledger.

    Args:
        ledger: The cells.
        needs_primary: Tells of a name whether only the primary can make anything of it, and not without its own part.
    """

    def __init__(self, ledger: Ledger, needs_primary: Callable[[str], bool]) -> None:
        self.recheck: bool = False  # cells that nothing is contributed to now may be complete
        self.reflags: bool = False  # a rank is lost that may have been about to contribute
        self.is_interleaved = False  # some rank: then to be in a later row is not to have passed the earlier ones
        self.silent: tuple[Key, ...] = ()  # cells given up in the last round that lack this rank
        self._ledger = ledger
        self._needs_primary = needs_primary

    def conclude(
        self, received: list[Contributed], own: Sequence[Key], header: Header
    ) -> tuple[tuple[Finished, ...], tuple[Key, ...], tuple[Key, ...]]:
        """Put what was contributed into its cells, and finish those that are ready.

        Args:
            received: What all ranks contributed in a round.
            own: To which of these cells this rank did.
            header: What all ranks said beside.

        Returns:
            What is finished, the cells to which this rank contributed though they were finished before, and those
            whose other contributions are forgotten.
        """
        ledger, self.silent = self._ledger, ()
        if not ledger.open and not self.reflags and self._is_all(received):  # as in every round of ranks in step
            self.recheck = False
            return self._finished_at_once(received), (), ()
        for key, totals, origin in received:
            cell = ledger.open_cell(key)
            cell.totals = cell.totals + totals if cell.totals.contributors else totals
            cell.origin = max(cell.origin, origin)
        ledger.own.update(own)
        late = tuple(key for key in own if ledger.open[key].corrects)
        finished, lost = self._finish_ready([key for key, *_ in received], header)
        return self._reflagged() + finished, late, lost

    def _is_all(self, received: list[Contributed]) -> bool:
        """Whether nobody is waited for, and none of it comes after its cell was finished."""
        names, size, finished = self._ledger.names, self._ledger.members.size, self._ledger.finished
        for key, totals, _ in received:
            if totals.contributors != min(size, names[key.name].usual or size) or key in finished:
                return False
        return not (finished.stale and any(finished.is_stale(key) for key, *_ in received))

    def _finished_at_once(self, received: list[Contributed]) -> tuple[Finished, ...]:
        """Finish cells to which all have contributed who are waited for."""
        ledger, size = self._ledger, self._ledger.members.size
        at_once = []
        for number, (key, totals, origin) in enumerate(received, ledger.opened):
            if ledger.assumed and totals.contributors >= size > 1:
                ledger.assumed.prove(key, number, origin)
            finished = ledger.finish(key, totals, origin)
            at_once.append(finished)
            if totals.contributors < size:
                ledger.assumed.note(finished, number, origin, size, sure=False)
        ledger.opened += len(received)
        self._forget()
        return tuple(at_once)

    def _forget(self) -> None:
        self._ledger.finished.forget(2 * len(self._ledger.names))

    def _reflagged(self) -> tuple[Finished, ...]:
        """After a rank was lost: finished values that lack it, though nobody knew then that it logs their names."""
        if not self.reflags:
            return ()
        self.reflags = False
        return tuple(self._ledger.flag(key) for key in self._ledger.assumed.disproved() if key not in self._ledger.open)

    # Which cells are ready

    def _finish_ready(self, touched: Sequence[Key], header: Header) -> Conclusion:
        """Finish what is ready, in the order in which it was opened.

        First that of new names, as others of the names may be complete by what is learnt from it.
        """
        cells = self._ledger.open
        passed = self._passed(touched)
        numbers = {key: cells[key].number for key in passed}
        first, lost = self._finish([_Ready(key, sure=True) for key in passed])
        suspects = {*touched, *(key for name in {key.name for key in passed} for key in cells.by_name.get(name, ()))}
        ready = self._ready(suspects & cells.keys(), header)
        self.silent = tuple(one.key for one in ready if one.gave_up and one.key not in self._ledger.own)
        if not passed:
            return self._finish(ready)
        numbers.update((key, cells[key].number) for key, *_ in ready)
        others, lost_of_others = self._finish(ready)
        return tuple(sorted(first + others, key=lambda value: numbers[value.key])), lost + lost_of_others

    def _passed(self, touched: Sequence[Key]) -> list[Key]:
        """Open cells of new names that all ranks have passed: each has contributed to a later row."""
        ledger, cells = self._ledger, self._ledger.open
        by_all = [] if self.is_interleaved else [key for key in touched if ledger.is_by_all(cells[key])]
        if not by_all:
            return []
        latest = max(by_all, key=lambda key: cells[key].number)
        row, number = row_of(latest, cells[latest].origin), cells[latest].number
        return [
            key
            for name in cells.by_name
            if ledger.names[name].is_new
            for key, cell in cells.by_name[name].items()
            if cell.number < number and row_of(key, cell.origin) != row
        ]

    def _ready(self, touched: set[Key], header: Header) -> list[_Ready]:
        """Cells to finish now: complete ones, those that all ranks have passed or gave up, all in a common pause."""
        ledger, cells = self._ledger, self._ledger.open
        everything = header.contributing == 0
        suspects = cells.keys() if self.recheck else touched
        self.recheck = False
        complete = {key for key in suspects if ledger.is_complete(key, cells[key])}
        if len(complete) == len(cells):
            return [_Ready(key, sure=everything, if_complete=not everything) for key in cells]
        newest: dict[str, int] = {}
        proof: dict[str, int] = {}
        for key in complete:
            cell = cells[key]
            if not cell.corrects and cell.number > newest.get(key.name, -1):
                newest[key.name] = cell.number
            if ledger.is_by_all(cell) and cell.number > proof.get(key.name, -1):
                proof[key.name] = cell.number
        ready = []
        for key in cells if everything else self._candidates(complete, header):
            cell = cells[key]
            is_behind = cell.number < newest.get(key.name, -1)  # a rank logs a name in order: all have passed this one
            in_order = bool(key.place.counted) or not self.is_interleaved  # else it is likely, once it is some time ago
            passed = is_behind and (in_order or cell.born <= header.give_up_new)
            passed_by_all = in_order and cell.number < proof.get(key.name, -1)
            is_new = ledger.names[key.name].is_new
            new = is_new and cell.born <= header.give_up_new and not self._lacks_primary(key, cell)
            gave_up = cell.born <= header.give_up_all
            if everything or key in complete or passed or new or gave_up:
                repeated = key.occurrence > 0 and not key.place.counted  # as a rank alone may log a name again
                given_up = gave_up and not (is_new or repeated or everything or is_behind or key in complete)
                by_now = not (everything or passed or new or gave_up)
                ready.append(_Ready(key, given_up, everything or passed_by_all, if_complete=by_now))
        return ready

    def _candidates(self, complete: Iterable[Key], header: Header) -> list[Key]:
        """Open cells that may be ready: complete ones, those that they passed, and those that may be given up."""
        cells = self._ledger.open
        names = {key.name for key in complete}
        if header.give_up_new > NOTHING:
            names.update(name for name in cells.by_name if self._ledger.names[name].is_new)
        found = {key for name in names for key in cells.by_name[name]}
        found.update(key for key, _ in takewhile(lambda old: old[1].born <= header.give_up_all, cells.items()))
        return sorted(found, key=lambda key: cells[key].number)

    def _lacks_primary(self, key: Key, cell: Cell) -> bool:
        """Whether a cell is of no use yet: what the others gave to it may be gone with them when the primary comes."""
        return -cell.origin >= CALLS and self._needs_primary(key.name)

    # Finishing them

    def _finish(self, ready: Iterable[_Ready]) -> Conclusion:
        ledger, finished, lost = self._ledger, [], []
        for key, gave_up, sure, if_complete in ready:
            cell = ledger.open[key]
            if if_complete and not ledger.is_complete(key, cell):
                continue  # more ranks log the name than before, as a cell has just shown
            ledger.open.close(key)
            is_own = key in ledger.own
            ledger.own.discard(key)
            if ledger.is_too_late(key, cell):
                lost += [key] if is_own else []
                if key in ledger.assumed:  # what was written has no flag, as nobody knew that a rank is missing
                    name, contributors = (
                        ledger.names[key.name],
                        ledger.assumed[key].contributors + cell.totals.contributors,
                    )
                    name.most = max(name.most, contributors)
                    finished.append(ledger.flag(key))
                continue
            if cell.totals.contributors < ledger.expected(key.name):
                self.recheck = True  # other cells of this name may be complete by this
            if ledger.is_by_all(cell):
                ledger.assumed.prove(key, cell.number, cell.origin)
            value = ledger.finish(
                key, cell.totals, cell.origin, gone=cell.gone, corrects=cell.corrects, gave_up=gave_up
            )
            is_of_others = ledger.members.size == 1 and not is_own  # who are gone
            has_gone = bool(cell.gone) or (cell.corrects and ledger.members.has_lost) or is_of_others
            finished.append(value.without_spread() if has_gone else value)
            ledger.assumed.note(finished[-1], cell.number, cell.origin, ledger.members.size, sure=sure)
        self._forget()
        return tuple(finished), tuple(lost)
