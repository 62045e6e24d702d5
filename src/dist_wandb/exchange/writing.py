"""The rows of a unit's finished values, as they are written into the run of one rank.

The spread of the ranks' numbers around their mean takes an exchange of its own once the mean is known. It is known only
if all ranks that contributed take part in that exchange, because each of them contributes the deviation of its own
number from the mean.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dist_wandb.exchange.protocol.calls import Call, Key
from dist_wandb.exchange.protocol.lanes import NOTHING, Number, number_at, reduced_numbers
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.transport import Group
from dist_wandb.notices import Notices
from dist_wandb.payloads.devices import PLAIN
from dist_wandb.settings.reduction import BUSY, DEGRADED, STEP, TIMES
from dist_wandb.wandb_files.stragglers import RANK, Stragglers, Timing

if TYPE_CHECKING:
    from dist_wandb.exchange.rows import Rows

_log = logging.getLogger("dist_wandb")
_REMEMBERED = 32_768  # own numbers that are kept for corrections
_MOST_FORMS = 4096  # tuples of names that are kept
_Finished = tuple[Row, dict[str, Any], int]  # with its values, and how many ranks it lacks


class Spreads:
    """One rank's part in the spreads of names that are wanted, and of timings, whose rows have `BUSY`."""

    def __init__(self, rank: int, is_wanted: Callable[[str], bool]) -> None:
        self._rank = rank  # in the unit
        self.may_have: Callable[[str], bool] = lambda name: name.startswith(TIMES) or is_wanted(name)
        # by the names of a row: the indices of those with a spread
        self._of = lru_cache(_MOST_FORMS)(
            lambda names: [at for at, name in enumerate(names) if (self.may_have if BUSY in names else is_wanted)(name)]
        )
        # own numbers by cell; plain tuples, which the garbage collector does not track
        self._own: OrderedDict[tuple[str, int | None, int], tuple[float, ...]] = OrderedDict()
        # Those that no row has got yet: the sum of w * (x - mean)**2, and the lowest rank that has the largest number,
        # or a NaN if there is one.
        self.found: dict[Key, tuple[float, int]] = {}

    def keep(self, calls: Iterable[Call]) -> None:
        for call in calls:
            for at in self._of(call.names):
                key = call.names[at], call.step, call.occurrences[at]
                self._own[key] = (*number_at(*call.lanes, at, len(call.names)),)
        while len(self._own) > _REMEMBERED:
            self._own.popitem(last=False)

    def due(self, rows: Iterable[Row]) -> list[tuple[Key, Number]]:
        """Return the cells of finished rows whose spread is wanted, and their numbers; equal on all ranks."""
        due = []
        for row in rows:
            for at in self._of(row.names):
                number = number_at(*row.lanes, at, len(row.names))
                if number.given and number.weight:
                    due.append((Key(row.names[at], row.step, row.occurrences[at]), number))
        return due

    def exchange(self, due: Sequence[tuple[Key, Number]], group: Group) -> None:
        """Exchange the deviations from the means of some cells, the same on all ranks; raise BrokenError on failure."""
        # this rank's parts in the sums of squares, whether it has one, and its negated index if it is largest
        squares, counts, largest = [0.0] * len(due), [0.0] * len(due), [NOTHING] * len(due)
        for index, (key, number) in enumerate(due):
            own = Number(*self._own.get((*key,), ()))
            if own.given:
                deviation, counts[index] = own.plain - number.reduced("mean"), 1.0
                if own.weight:  # multiplied, because huge deviations overflow to infinity, but raise with a power
                    squares[index] = own.weight * deviation * deviation
                if own.is_nan if number.is_nan else own.weight and own.largest == number.largest:
                    largest[index] = -float(self._rank)
        sums, maxima = group.reduce([*squares, *counts], largest)
        for index, (key, number) in enumerate(due):
            if sums[len(due) + index] == number.given:
                self.found[key] = sums[index], -1 if maxima[index] == NOTHING else int(-maxima[index])


class Writing:
    """Turns finished rows into rows of this rank's run, if this rank writes the rows of its unit."""

    def __init__(self, rows: Rows) -> None:
        self.is_over = False  # whether the run is being finished: nothing more is written
        self.due: int = 0  # how many rows are being written
        self.marked: int = 0  # how many rows lack a rank
        self.last_position: str = "the start"  # of the last row, for messages
        self.global_rank_of: Any = lambda index: index  # in the job, given that in the unit
        self._rows = rows
        self._notices = Notices()
        self._stragglers = Stragglers()
        self.timings: dict[str, Timing] = defaultdict(Timing)  # by name
        self._open: Mapping[str, Any] = {}  # the values of a row that was left open for further ones of its step
        self._open_x: int | None = None  # its position
        self._held: list[_Finished] = []  # rows that may continue another one, which still waits for ranks
        self._parts = 0  # how many calls that left a row open are written

    def write(self, rows: Sequence[Row]) -> None:
        try:
            for index, row in enumerate(rows):
                self.due = len(rows) - index
                if self._rows.writes or row.own:
                    try:
                        values, missing = dict[str, Any](), row.missing
                        if self._rows.writes and row.names:
                            values, missing = self._values(row)
                        self._held.append((row, values, missing))
                        self._write_held()
                    except Exception as error:  # noqa: BLE001  # in the making of the row
                        self._lose(error, len(row.names))
        finally:
            self.due = 0
        if rows:
            step, x = rows[-1].step, rows[-1].x
            self.last_position = f"row {-x}" if step is None and x < 0 else f"step {self._rows.x(x)}"

    def end(self) -> None:
        while self._held:
            self._write_finished(*self._held.pop(0))
        self.end_row()

    def end_row(self) -> None:
        if self._open:
            self._write({}, None, commit=None)
            self._rows.keep_summary({}, None, None, is_open=False, serial=0)

    def _write_held(self) -> None:
        """Write the rows that do not continue one which is not written; from the first again, which may continue it."""
        at = 0
        while at < len(self._held):
            row = self._held[at][0]
            parts = max([self._parts, *map(attrgetter("part"), row.own)])
            if row.corrects or max([0, *map(attrgetter("after"), row.own)]) <= parts:
                self._parts = parts
                self._write_finished(*self._held.pop(at))
                at = 0
            else:
                at += 1

    def _write_finished(self, row: Row, values: dict[str, Any], missing: int) -> None:
        own, commit, is_value = {}, row.step is None and not row.own, False
        for one in row.own:
            own.update(one.values)
            commit, is_value = commit or one.commit, is_value or one.is_value
        values.update(own)
        if not values:
            if commit and row.x >= 0:  # without steps, the next row has another position
                self.end_row()
            return
        before = max(map(attrgetter("writes_before"), row.own), default=None)
        self._rows.act(before)
        axes = {name: value for name, value in row.axes.items() if name not in own} if row.axes else {}
        if row.corrects or not self._fits(values, axes):
            self.end_row()
        values.update(axes)
        if missing:
            values[DEGRADED] = missing
            self.marked += 1
        if BUSY in values:
            values.update(self._stragglers.detect(values.get(STEP)))
            if RANK in values:
                self.timings[RANK].counts[values[RANK]] += 1
        # As in wandb, a row left open without a step takes a framework's axis from the call that ends it.
        is_open = commit is False and row.step is None and self._rows.first is None and not row.corrects
        x = None if is_open else self._rows.x(row.x)
        if is_value and self._open and not row.corrects:
            values[self._rows.writer.step_metric or ""], x = x, self._open_x
        self._write(values, x, commit=True if row.corrects else commit)
        is_left_open = not (commit or row.corrects)
        joined = dict(zip(row.names, row.joined, strict=False))
        place = {"corrects": row.corrects, "serial": row.serial, "joined": joined}
        self._rows.keep_summary(values, before, x, is_open=is_left_open, **place)

    def write_own(self, row: Mapping[str, Any], values: Mapping[str, Any], x: int | None, *, commit: bool) -> None:
        """Write this rank's own values with the x axes of their row, or add them to its open row."""
        if not self._fits(values, {name: value for name, value in row.items() if name not in values}):
            self.end_row()
        if values or self._open:
            self._write(row, x, commit=commit)

    def _fits(self, values: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
        """Return whether the open row may hold a call too: it has no other value of its names, nor of the x axes."""
        before = self._open
        for name, value in axes.items():
            if before.get(name, value) != value:
                return False
        for name in before.keys() & values.keys() - axes.keys():
            if not PLAIN.issuperset({type(before[name]), type(values[name])}) or before[name] != values[name]:
                return False
        return True

    def _values(self, row: Row) -> tuple[dict[str, Any], int]:
        names, own = row.names, self._rows
        numbers = reduced_numbers(*row.lanes, own.reductions.of_all(names), row.ranks[0])
        values = dict(zip(names, numbers, strict=True))
        missing = row.missing
        counts = row.lanes[0][-len(names) :]
        for index, key in enumerate(row.cells()) if counts.count(0.0) else ():
            if not counts[index]:  # it has no number, but what the ranks attached
                del values[key.name]
                added, lacks = own.attachments.pop_values(key, row.ranks[index], corrects=row.corrects)
                values.update(added)
                if lacks:
                    values[DEGRADED] = lacks  # also if the row has nothing else
                missing = max(missing, lacks)
        for kept in row.own:
            if kept.exact:
                values.update((name, exact) for name, exact in kept.exact.items() if values.get(name) == float(exact))
        if own.spreads.found:
            self._add_spreads(values, row)
        return values, missing

    def _add_spreads(self, values: dict[str, Any], row: Row) -> None:
        for index, key in enumerate(row.cells()):
            spread = self._rows.spreads.found.pop(key, None)
            if spread is None or self._rows.reductions.of(key.name) == "first":
                continue
            (squares, largest_at), name = spread, key.name
            number = number_at(*row.lanes, index, len(row.names))
            values.update({f"{name}/{kind}": number.reduced(kind) for kind in ("min", "max")})
            values[f"{name}/std"] = math.sqrt(squares / number.weight)
            values[f"{name}/argmax_rank"] = self.global_rank_of(largest_at)
            if name.startswith(TIMES) and row.ranks[index] > 1:
                rank, largest, ranks = values[f"{name}/argmax_rank"], values[f"{name}/max"], row.ranks[index]
                self.timings[name].add(rank, largest, values[name], values[f"{name}/min"])
                if name == BUSY:
                    self._stragglers.add(rank, largest, (ranks * values[name] - largest) / (ranks - 1))

    def _write(self, row: Mapping[str, Any], x: int | None, *, commit: bool | None) -> None:
        if self.is_over:
            return
        if commit is not False:
            self._open, self._open_x = {}, None
        else:
            self._open, self._open_x = {**(self._open if x == self._open_x else {}), **row}, x
        try:
            self._rows.writer.write(row, x, commit=commit)
        except Exception as error:  # noqa: BLE001  # of W&B
            self._lose(error, len(row))

    def _lose(self, error: Exception, values: int) -> None:
        """Report a row that could not be written, once for each kind of error: it must not stop the later ones."""
        self._rows.writer.lost["that W&B refused"] += values
        text = "dist_wandb: rank %d could not write a row; it is lost. More errors of this kind are not reported"
        if self._notices.is_first(type(error)):
            _log.error(text, self._rows.rank, exc_info=error)
