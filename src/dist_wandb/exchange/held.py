"""Values that wait on a rank for their row, and the reductions of the row's numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dist_wandb.exchange.attachments.attachment import Attachments
from dist_wandb.exchange.protocol.cells import Key
from dist_wandb.exchange.x_axis import XAxis
from dist_wandb.settings.reduction import TIMES, Reduction, reduction_of


class RowWriter(Protocol):
    """Writes rows into the run of one rank."""

    label: str | None  # this rank's label in a shared run; `None` in any other
    is_primary: bool  # whether this rank writes the plain names
    has_own_run: bool  # whether each rank has a run of its own
    step_metric: str | None  # name of the x axis in every row; `None` for none

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write to."""

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row unchanged, at `x` on the x axis; `None` leaves the x axis out of the row."""

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row at `step` on the x axis; `commit` as in `wandb.Run.log`."""


class Reductions:
    """The reduction of each name, by patterns as in `Rows`.

    Attributes:
        unused: The patterns that no name has matched yet.
    """

    def __init__(self, reduce: Mapping[str, Reduction] | None) -> None:
        self.unused: dict[str, Any | None] = dict.fromkeys(reduce or ())
        self._reduce = reduce or {}
        self._known: dict[str, Reduction] = {}

    def of(self, name: str) -> Reduction:
        """Return the reduction of a name: that of the first matching pattern, or the mean."""
        if name not in self._known:
            is_time = name.startswith(TIMES)  # general patterns do not apply to times
            reduce = {one: kind for one, kind in self._reduce.items() if not is_time or one.startswith(TIMES)}
            pattern, self._known[name] = reduction_of(name, reduce)
            self.unused.pop(pattern, None)
        return self._known[name]


@dataclass(frozen=True)
class Held:
    """The state with which totals and rows are made."""

    reductions: Reductions  # how the ranks' numbers of each name are reduced
    attachments: Attachments  # metric states, tables and images
    x_axis: XAxis  # the positions of rows
    # by the cell whose row they join: this rank's own values, and their position on the x axis
    extras: OrderedDict[Key, tuple[dict[str, Any], int | None]] = field(default_factory=OrderedDict)
