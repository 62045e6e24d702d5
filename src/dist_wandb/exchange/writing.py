"""The rows of the unit's finished values, as they are written into this rank's run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dist_wandb.exchange.held import Held, RowWriter
from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.lanes import number_at, reduced_numbers
from dist_wandb.exchange.protocol.table import Row
from dist_wandb.exchange.stragglers import Stragglers
from dist_wandb.notices import Notices
from dist_wandb.settings.reduction import BUSY, STEP

_log = logging.getLogger("dist_wandb")

DEGRADED = "dist_wandb/degraded"
_LEFT_OPEN = 2.0  # seconds after which a row is ended that a call with a step left open for more values of this step


class _OpenRow(NamedTuple):
    """A row that was left open for further values of its step."""

    values: Mapping[str, Any]
    x: int | None  # its position
    since: float  # the time of its last value, in seconds


_NONE = _OpenRow({}, None, 0.0)


class Writing:
    """Turns finished rows into rows of this rank's run, if this rank writes the rows of its unit."""

    def __init__(self, writer: RowWriter, held: Held, rank: int) -> None:
        self.is_over = False  # whether the run is being finished: nothing more is written
        self.due: int = 0  # how many rows are being written
        self.last_position: str = "the start"  # of the last row, for messages
        self.global_rank_of: Any = lambda index: index  # in the job, given that in the unit
        self._writer = writer
        self._held = held
        self._rank = rank
        self._notices = Notices()
        self._stragglers = Stragglers()
        self._open = _NONE

    def write(self, rows: Sequence[Row]) -> None:
        """Write finished rows."""
        try:
            for index, row in enumerate(rows):
                self.due = len(rows) - index
                if self._writer.is_primary or row.own:
                    self._write_row(row)
        finally:
            self.due = 0
        if rows:
            self.last_position = self._held.shown(rows[-1].step, rows[-1].x)

    def end_row(self, now: float = math.inf) -> None:
        """End a row that was left open, if that is some time ago."""
        if self._open.values and now - self._open.since >= _LEFT_OPEN:
            self._write({}, None, commit=None)

    def _write_row(self, row: Row) -> None:
        values: dict[str, Any] = {}
        missing = row.missing
        if self._writer.is_primary and row.names:
            values, missing = self._values(row)
        own, commit = {}, row.step is None
        for one in row.own:
            own.update(one.values)
            commit = commit if one.commit is None else one.commit
        values.update(own)
        if not values:
            return
        follows = max((one.follows for one in row.own), default=None)
        self._held.act(follows)
        axes = {name: value for name, value in row.axes.items() if name not in own}
        if row.corrects or not self._fits(values, axes):
            self.end_row()
        values.update(axes)
        if missing:
            values[DEGRADED] = missing
            self._held.marked[DEGRADED] += 1
        if BUSY in values:
            values.update(self._stragglers.detect(values.get(STEP)))
        x = self._held.x(row.x)
        self._write(values, x, commit=True if row.corrects else commit)
        self._held.keep_summary(values, follows, x, is_open=not commit, corrects=row.corrects)

    def _fits(self, values: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
        """Return whether the open row may hold a call too: no name of it yet, and the same place on the user's axes."""
        same = all(self._open.values.get(name, value) == value for name, value in axes.items())
        return same and self._open.values.keys().isdisjoint(values.keys() - axes.keys())

    def _values(self, row: Row) -> tuple[dict[str, Any], int]:
        """Return the reduced values of a row, and how many ranks are missing."""
        names, held = row.names, self._held
        numbers = reduced_numbers(*row.lanes, held.reductions.of_all(names), row.ranks[0])
        values = dict(zip(names, numbers, strict=True))
        missing = row.missing
        if row.lanes[0][-len(names) :].count(0.0):  # some name has no number
            for index, key in enumerate(row.cells()):
                if not row.lanes[0][3 * len(names) + index]:
                    missing = max(missing, self._add_attached(values, key, row, index))
        if held.spreads.has_any:
            self._add_spreads(values, row)
        return values, missing

    def _add_attached(self, values: dict[str, Any], key: Key, row: Row, index: int) -> int:
        """Replace a value without a number by what the ranks attached; return how many parts are missing."""
        del values[key.name]
        added, missing = self._held.attachments.pop_values(key, row.ranks[index], corrects=row.corrects)
        values.update(added)
        if missing:
            values[DEGRADED] = missing  # also if the row has nothing else
        return missing

    def _add_spreads(self, values: dict[str, Any], row: Row) -> None:
        for index, key in enumerate(row.cells()):
            spread = self._held.spreads.pop(key)
            if spread is None or self._held.reductions.of(key.name) == "first":
                continue
            name, number = key.name, number_at(*row.lanes, index, len(row.names))
            values.update({f"{name}/{kind}": number.reduced(kind) for kind in ("min", "max")})
            values[f"{name}/std"] = math.sqrt(spread.squares / number.weight)
            values[f"{name}/argmax_rank"] = self.global_rank_of(spread.largest_at)
            if name == BUSY and row.ranks[index] > 1:
                largest, ranks = values[f"{name}/max"], row.ranks[index]
                others = (ranks * values[name] - largest) / (ranks - 1)
                self._stragglers.add(values[f"{name}/argmax_rank"], largest, others)

    def _write(self, row: Mapping[str, Any], x: int | None, *, commit: bool | None) -> None:
        if self.is_over:
            return
        if commit is not False:
            self._open = _NONE
        else:
            before = self._open.values if x == self._open.x else {}
            self._open = _OpenRow({**before, **row}, x, time.monotonic())
        try:
            self._writer.write(row, x, commit=commit)
        except Exception as error:  # noqa: BLE001  # a row that W&B rejects must not stop the later ones
            self._writer.lost["that W&B refused"] += len(row)
            if self._notices.is_first(type(error)):
                _log.exception(
                    "dist_wandb: rank %d could not write a row; it is lost. More errors of this kind are not reported",
                    self._rank,
                )
