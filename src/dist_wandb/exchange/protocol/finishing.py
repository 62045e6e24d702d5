"""The rules by which cells are finished. Pure, and equal on all ranks: the decisions depend on reduced values only.

An open cell is finished when

- all ranks contributed, or as many as did when the name was finished last (*complete*);
- all ranks have *passed* it: a later cell of its name is complete, because a rank logs a name in order; or, for a name
  that was never finished, all ranks have contributed to one later row. So a name that only rank 0 logs in addition to
  the others joins their row from the second time on;
- a rank has waited long enough for others (*gave up*): a short time for names that were never finished, a long time for
  names whose usual number of contributors is known;
- all ranks pause or close.

If a rank logs from several threads or processes (*interleaved*; workers of a DataLoader), its order proves nothing, and
cells that would count as passed wait until a rank gives up. The same applies to single cells that are *displaced*: a
rank has contributed to them before it contributed what it had logged earlier. The cell of a metric is not given up
before the primary has contributed to it: nobody else can compute it, and the states of the others might be gone by the
time the primary contributes.

Invariants: cells of one round are finished in the order in which they were opened; a cell is finished once for each
time that it was opened; the fast path at the start of `conclude` has the same result as the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from dist_wandb.exchange.protocol.cells import CALLS, NOTHING, Cell, Contributed, Finished, Key
from dist_wandb.exchange.protocol.ledger import Ledger, row_of
from dist_wandb.exchange.protocol.wire import OVERTAKING, Header


class _Ready(NamedTuple):
    """A cell to finish."""

    key: Key
    gave_up: bool = False  # whether the only reason is that a rank gave up waiting for ranks that usually contribute
    sure: bool = False  # whether it is certain that the silent ranks have passed it
    if_complete: bool = False  # whether to finish it only if it is still complete after those before it


Conclusion = tuple[tuple[Finished, ...], tuple[Key, ...]]  # values; cells whose earlier contributions are forgotten


class Finishing:
    """Finishes the cells of a ledger; `needs_primary` as in `Rounds`."""

    def __init__(self, ledger: Ledger, needs_primary: Callable[[str], bool]) -> None:
        self.recheck: bool = False  # cells without new contributions may be complete
        self.reflags: bool = False  # a lost rank may have been about to contribute
        self.is_interleaved = False  # some rank is: a later row does not prove that it has passed the earlier ones
        self.silent: tuple[Key, ...] = ()  # cells given up in the last round without this rank's contribution
        self._ledger = ledger
        self._needs_primary = needs_primary
        self._overtakes = False  # in this round, contributions may overtake others

    def conclude(
        self, received: list[Contributed], own: Sequence[Key], header: Header, *, is_split: bool = False
    ) -> tuple[tuple[Finished, ...], tuple[Key, ...], tuple[Key, ...]]:
        """Add contributions to their cells, and finish the cells that are ready.

        Args:
            received: Contributions of all ranks in a round.
            own: The cells among them to which this rank contributed.
            header: The reduced header of the round.
            is_split: Whether some names of a row without a step wait for a later round.

        Returns:
            The finished values, the cells that were finished before this rank contributed to them, and those of them
                whose earlier contributions are forgotten.
        """
        ledger, self.silent = self._ledger, ()
        self._overtakes = is_split or header.disorder == OVERTAKING
        if not ledger.open and not self.reflags and self._is_all(received):  # the usual case: all ranks are in step
            self.recheck = False
            return self._finished_at_once(received), (), ()
        for key, totals, origin in received:
            cell = ledger.open_cell(key)
            cell.totals = cell.totals + totals if cell.totals.contributors else totals
            cell.origin = max(cell.origin, origin)
            cell.displaced = cell.displaced or self._overtakes
        ledger.own.update(own)
        late = tuple(key for key in own if ledger.open[key].corrects)
        finished, lost = self._finish_ready([key for key, *_ in received], header)
        return self._reflagged() + finished, late, lost

    def _is_all(self, received: list[Contributed]) -> bool:
        """Return whether no further rank is awaited, and none of these cells was finished before."""
        names, size, finished = self._ledger.names, self._ledger.members.size, self._ledger.finished
        for key, totals, _ in received:
            if totals.contributors != min(size, names[key.name].usual or size) or key in finished:
                return False
        return not (finished.stale and any(finished.is_stale(key) for key, *_ in received))

    def _finished_at_once(self, received: list[Contributed]) -> tuple[Finished, ...]:
        """Finish cells to which all awaited ranks have contributed."""
        ledger, size = self._ledger, self._ledger.members.size
        at_once = []
        for number, (key, totals, origin) in enumerate(received, ledger.opened):
            if ledger.assumed and totals.contributors >= size > 1 and not self._overtakes:
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
        """Return flagged copies of values that were finished before it was known that a lost rank logs their names."""
        if not self.reflags:
            return ()
        self.reflags = False
        return tuple(self._ledger.flag(key) for key in self._ledger.assumed.disproved() if key not in self._ledger.open)

    # Which cells are ready

    def _finish_ready(self, touched: Sequence[Key], header: Header) -> Conclusion:
        """Finish the cells that are ready, in the order in which they were opened.

        Passed cells of new names come first, because they may show that other cells of these names are complete.
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
        """Return open cells of new names that all ranks have passed: each rank has contributed to a later row."""
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
            if cell.number < number and not cell.displaced and row_of(key, cell.origin) != row
        ]

    def _ready(self, touched: set[Key], header: Header) -> list[_Ready]:
        """Return the cells to finish: complete, passed and given-up ones; all in a common pause."""
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
            if not (cell.corrects or cell.displaced) and cell.number > newest.get(key.name, -1):
                newest[key.name] = cell.number
            if ledger.is_by_all(cell) and cell.number > proof.get(key.name, -1):
                proof[key.name] = cell.number
        ready = []
        for key in cells if everything else self._candidates(complete, header):
            cell = cells[key]
            is_behind = cell.number < newest.get(key.name, -1)  # a rank logs a name in order: all have passed it
            in_order = not cell.displaced and (bool(key.position.counted) or not self.is_interleaved)  # else likely
            passed = is_behind and (in_order or cell.born <= header.give_up_new)
            passed_by_all = in_order and cell.number < proof.get(key.name, -1)
            is_new = ledger.names[key.name].is_new
            new = is_new and cell.born <= header.give_up_new and not self._lacks_primary(key, cell)
            gave_up = cell.born <= header.give_up_all
            if everything or key in complete or passed or new or gave_up:
                repeated = key.occurrence > 0 and not key.position.counted  # one rank alone may repeat a name
                given_up = gave_up and not (is_new or repeated or everything or is_behind or key in complete)
                by_now = not (everything or passed or new or gave_up)
                ready.append(_Ready(key, given_up, everything or passed_by_all, if_complete=by_now))
        return ready

    def _candidates(self, complete: Iterable[Key], header: Header) -> list[Key]:
        """Return open cells that may be ready: complete cells, cells behind these, and cells that may be given up."""
        cells = self._ledger.open
        names = {key.name for key in complete}
        if header.give_up_new > NOTHING:
            names.update(name for name in cells.by_name if self._ledger.names[name].is_new)
        found = {key for name in names for key in cells.by_name[name]}
        found.update(key for key, _ in takewhile(lambda old: old[1].born <= header.give_up_all, cells.items()))
        return sorted(found, key=lambda key: cells[key].number)

    def _lacks_primary(self, key: Key, cell: Cell) -> bool:
        """Return whether a cell cannot be computed yet: the primary needs to contribute first."""
        return -cell.origin >= CALLS and self._needs_primary(key.name)

    # Finishing them

    def _finish(self, ready: Iterable[_Ready]) -> Conclusion:
        ledger, finished, lost = self._ledger, [], []
        for key, gave_up, sure, if_complete in ready:
            cell = ledger.open[key]
            if if_complete and not ledger.is_complete(key, cell):
                continue  # a cell has just shown that more ranks log the name than before
            ledger.open.close(key)
            is_own = key in ledger.own
            ledger.own.discard(key)
            if ledger.is_too_late(key, cell):
                lost += [key] if is_own else []
                if key in ledger.assumed:  # the written value has no flag: a rank was not known to be missing
                    name = ledger.names[key.name]
                    name.most = max(name.most, ledger.assumed[key].contributors + cell.totals.contributors)
                    finished.append(ledger.flag(key))
                continue
            if cell.totals.contributors < ledger.expected(key.name):
                self.recheck = True  # other cells of this name may now be complete
            if ledger.is_by_all(cell):
                ledger.assumed.prove(key, cell.number, cell.origin)
            value = ledger.finish(
                key, cell.totals, cell.origin, gone=cell.gone, corrects=cell.corrects, gave_up=gave_up
            )
            is_of_others = ledger.members.size == 1 and not is_own  # of ranks that are gone
            has_gone = bool(cell.gone) or (cell.corrects and ledger.members.has_lost) or is_of_others
            finished.append(value._replace(spread=None) if has_gone else value)
            ledger.assumed.note(finished[-1], cell.number, cell.origin, ledger.members.size, sure=sure)
        self._forget()
        return tuple(finished), tuple(lost)
