"""What waits on a rank for the row that it belongs to, and how the numbers of that row become one."""

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
    """Writes rows into the run of one rank.

    Attributes:
        label: This rank's label in a shared run; `None` in any other.
        is_primary: Whether the plain names are this rank's to write.
        has_own_run: Whether each rank has a run of its own.
        step_metric: Name of the x axis in every row; `None` for none.
    """

    label: str | None
    is_primary: bool
    has_own_run: bool
    step_metric: str | None

    @property
    def has_run(self) -> bool:
        """Whether there is a run to write into."""

    def write_plain(self, row: Mapping[str, Any], x: int | None) -> None:
        """Write one row as it is, at `x` on the x axis; `None` leaves the x axis out of the row."""

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write one row at `step` on the x axis; `commit` as in `wandb.Run.log`."""


class Reductions:
    """How the ranks' numbers of each name become one.

    Args:
        reduce: Name patterns and reductions, the first that matches counts; `None` for no reduction.

    Attributes:
        unused: The patterns that no name has matched yet.
    """

    def __init__(self, reduce: Mapping[str, Reduction] | None) -> None:
        self.unused: dict[str, Any | None] = dict.fromkeys(reduce or ())
        self._reduce = reduce or {}
        self._known: dict[str, Reduction] = {}

    def of(self, name: str) -> Reduction:
        """How the ranks' numbers of a name become one: by the first pattern that matches, else their mean."""
        if name not in self._known:
            is_time = name.startswith(TIMES)  # what holds for all names does not hold for seconds
            reduce = {one: kind for one, kind in self._reduce.items() if not is_time or one.startswith(TIMES)}
            pattern, self._known[name] = reduction_of(name, reduce)
            self.unused.pop(pattern, None)
        return self._known[name]


@dataclass(frozen=True)
class Held:
    """What totals and rows are made with.

    Args:
        reductions: How the ranks' numbers of each name become one.
        attachments: States of metrics, tables and images.
        x_axis: Where rows lie.
        extras: By the cell in whose row they are to be: this rank's own values, and their position on the x axis.
    """

    reductions: Reductions
    attachments: Attachments
    x_axis: XAxis
    extras: OrderedDict[Key, tuple[dict[str, Any], int | None]] = field(default_factory=OrderedDict)
