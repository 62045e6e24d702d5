"""The rows of the unit's finished values: one row for the values of one position, which `x_axis` determines."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from dist_wandb.exchange.held import Held, RowWriter
from dist_wandb.exchange.protocol.cells import Finished
from dist_wandb.exchange.stragglers import Stragglers
from dist_wandb.notices import Notices
from dist_wandb.settings.reduction import BUSY, STEP

_log = logging.getLogger("dist_wandb")

DEGRADED = "dist_wandb/degraded"


class Writing:
    """Turns finished values into rows of this rank's run, if this rank writes the rows of its unit.

    Attributes:
        is_over: Whether the run is being finished: nothing more is written.
        unwritten: Number of rows that came after that.
        last_position: The position of the last row, for messages.
        global_rank_of: Returns the index in the job of a rank of the unit.
    """

    def __init__(self, writer: RowWriter, held: Held, rank: int) -> None:
        self.is_over = False
        self.unwritten: int = 0
        self.last_position: str = "the start"
        self.global_rank_of: Any = lambda index: index
        self._writer = writer
        self._held = held
        self._rank = rank
        self._notices = Notices()
        self._stragglers = Stragglers()

    def write_finished(self, values: Sequence[Finished]) -> None:
        """Write finished values: those of one position as one row, unless a name occurs twice."""
        if values and self._writer.is_primary:
            row: dict[str, Any] = {}
            last, position = values[0], self._held.x_axis.row_of(values[0])
            for value in values:
                here = self._held.x_axis.row_of(value)
                if here != position or value.key.name in row:
                    self._write(row, last)
                    row = {}
                last, position = value, here
                self._add(row, value)
            self._write(row, last)
        if values:
            self.last_position = self._held.x_axis.shown(values[-1])

    def write_left_over(self) -> None:
        """Write values whose row's numbers never came."""
        for own, x in self._held.extras.values():
            self._writer.write_plain(own, x)
        self._held.extras.clear()

    def _add(self, row: dict[str, Any], value: Finished) -> None:
        name, totals = value.key.name, value.totals
        if self._held.extras:
            row.update(self._held.extras.pop(value.key, ({}, None))[0])
        missing = value.missing
        if not totals.number:
            taken = self._held.attachments.pop_values(value)
            if taken is None:
                return  # a better value was written before
            row.update(taken[0])
            missing = max(missing, taken[1])
        else:
            row[name] = totals.reduced(self._held.reductions.of(name))
        if missing:
            row[DEGRADED] = max(missing, row.get(DEGRADED, 0))
        if value.spread is not None and totals.weight and self._held.reductions.of(name) != "first":
            reduced = {"min": totals.reduced("min"), "max": totals.reduced("max")}
            row.update({f"{name}/{kind}": number for kind, number in reduced.items()})
            row[f"{name}/std"] = math.sqrt(value.spread.squares / totals.weight)
            row[f"{name}/argmax_rank"] = self.global_rank_of(value.spread.largest_at)
            if name == BUSY and totals.contributors > 1:
                largest, ranks = row[f"{name}/max"], totals.contributors
                others = (ranks * row[name] - largest) / (ranks - 1)
                self._stragglers.add(row[f"{name}/argmax_rank"], largest, others)

    def _write(self, row: dict[str, Any], value: Finished) -> None:
        if not row:
            return
        if BUSY in row:
            row.update(self._stragglers.detect(row.get(STEP)))
        if self.is_over:
            self.unwritten += 1
            return
        try:
            self._writer.write_plain(row, self._held.x_axis.x_of(value))
        except Exception as error:  # noqa: BLE001  # a row that W&B rejects must not stop the later ones
            if self._notices.is_first(type(error)):
                _log.exception(
                    "dist_wandb: rank %d could not write a row; it is lost. More errors of this kind are not reported",
                    self._rank,
                )
