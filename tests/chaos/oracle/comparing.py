"""Compare a run of this package with that of stock wandb, row by row, and name what differs.

`INTENDED` is the list of all differences on purpose. What is not in it is a fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any

from oracle.recorded import Recorded

X = "global_step"
DEGRADED = "dist_wandb/degraded"

INTENDED = {
    "_step, _runtime, _timestamp, _wandb": "They are wandb's count of rows, times, versions and the like. Our x axis "
    "takes the place of `_step`: with wandb's own steps, W&B would drop a late row.",
    "global_step": "Each of our rows has its position, and so has the summary; it must be the step of the stock row. "
    "It is the x axis of all names for which stock has none.",
    "steps that go backwards or repeat": "W&B drops such rows with a warning; here they are kept. Stock gets a script "
    "whose steps increase (`scripts.for_stock`).",
    "another value of a name for the second time at a step, with several ranks": "W&B overwrites the first value; here "
    "the call begins a row of its own (design: rows stay whole).",
    "a name that becomes an x axis after it was logged, with several ranks": "Earlier calls that "
    "had not been exchanged when it was defined count as calls with an axis, so that they may be one row with others.",
    "commit=True, then the same step again": "W&B drops the second call. Here it is a row of its own.",
    "a row without a step, after one with a step": "Here it lies at the last step that was given (docs/numbers.md), in "
    "W&B at the next one. The position comes from `scripts.for_stock`; what stands in the row comes from W&B.",
    "calls at one position of a framework's axis": "Lightning's logger and the Trainer's callback give W&B no step, so "
    "that each call is a row there. Here calls with other names at one step may stand in one row. A row must have more "
    "than step and epoch.",
    "true and false in a job of several ranks": "They count as numbers, 1 and 0, because their mean is a number.",
    "dist_wandb/degraded after a failure": "After an exception or an exit code nobody waits for anybody, so that a row "
    "may lack a rank, and says so. Without a failure, a row with this name is a fault.",
}
"""What differs on purpose, each with its reason."""

_OF_WANDB = frozenset({"_runtime", "_timestamp", "_step", "_wandb"})


@dataclass(frozen=True)
class Terms:
    """What is known of two runs that are compared."""

    # the position of a row on our x axis by stock's step, where they differ
    x_of: Mapping[int, int] = field(default_factory=dict)
    x: str = X  # name of our x axis; empty if stock has the same one, so that it counts as a value
    is_failing: bool = False  # whether the script ends with a failure
    has_peers: bool = False  # whether our run is that of a job of several ranks
    unlike: frozenset[str] = frozenset()  # further names that are not compared, in rows, summary and config
    # if given, consecutive rows with equal values of these names, and no other name in common, are one row
    joined: frozenset[str] = frozenset()

    def of_user(self, values: Mapping[str, Any]) -> dict[str, Any]:
        left_out = {self.x, *self.unlike, *([DEGRADED] if self.is_failing else ())}
        kept = {name: value for name, value in values.items() if name.split(".")[0] not in _OF_WANDB | left_out}
        return {name: self._compared(value) for name, value in kept.items() if name not in left_out}

    def _compared(self, value: Any) -> Any:
        if isinstance(value, bool) and self.has_peers:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):  # a mean of equal numbers may differ in the last digit
            return float(f"{value:.12g}")
        return value

    def rows_of_stock(self, run: Recorded) -> list[Row]:
        """Return the rows of stock wandb, at the positions that they have on our x axis."""
        return self._joined(
            Row(self.x_of.get(row["_step"], row["_step"]) if self.x else None, self.of_user(row)) for row in run.rows
        )

    def rows_of_ours(self, run: Recorded) -> list[Row]:
        return self._joined(Row(row.get(self.x), self.of_user(row)) for row in run.rows)

    def _joined(self, rows: Iterable[Row]) -> list[Row]:
        joined: list[Row] = []
        for row in rows:
            last = joined[-1] if joined and self.joined else Row(None, {})
            shared = row.values.keys() & last.values.keys()
            has_more = min(len(each.values.keys() - self.joined) for each in (row, last)) > 0
            if has_more and shared <= self.joined and all(row.values[name] == last.values[name] for name in shared):
                joined[-1] = Row(row.x, {**last.values, **row.values})
            else:
                joined.append(row)
        return joined


@dataclass(frozen=True)
class Row:
    """One row: its position on the x axis, and its values by name."""

    x: Any
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{'' if self.x is None else f'x={self.x}  '}{json.dumps(dict(sorted(self.values.items())))}"


def compare(stock: Recorded, ours: Recorded, terms: Terms) -> list[str]:
    """Return all differences that are not intended, each as text that begins with what differs."""
    if stock.problem or ours.problem:
        return [f"unreadable: stock: {stock.problem or 'read'}; ours: {ours.problem or 'read'}"]
    found = _rows_differ(list(map(str, terms.rows_of_stock(stock))), list(map(str, terms.rows_of_ours(ours))))
    found += _values_differ("summary", terms.of_user(stock.summary), terms.of_user(ours.summary))
    found += _values_differ("config", terms.of_user(stock.config), terms.of_user(ours.config))
    names = {name for row in stock.rows for name in terms.of_user(row)}
    ours_of = {name: ours.axis_of(name) for name in names}
    found += _values_differ(
        "axis",
        {name: stock.axis_of(name) for name in names},
        {name: "" if axis == terms.x else axis for name, axis in ours_of.items()},
    )
    if stock.exit_code != ours.exit_code:
        found.append(f"exit code: stock {stock.exit_code}, ours {ours.exit_code}")
    return found


def _rows_differ(stock: list[str], ours: list[str]) -> list[str]:
    """Return all rows of both as one difference; nothing if they are equal."""
    lines = unified_diff(stock, ours, "stock", "ours", lineterm="", n=len(stock))
    return [] if stock == ours else ["\n    ".join(["rows:", *lines])]


def _values_differ(what: str, stock: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    found = []
    for name in sorted({*stock, *ours}):
        texts = [json.dumps(values[name]) if name in values else "nothing" for values in (stock, ours)]
        if texts[0] != texts[1]:
            found.append(f"{what}: {name}: stock {texts[0]}, ours {texts[1]}")
    return found
