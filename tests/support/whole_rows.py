"""Compare the rows of a run as wholes with the calls of `log`: names, values, place and axes, and that none is torn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Row = dict[str, Any]


def differences(
    rows: Iterable[Mapping[str, Any]],
    calls: Iterable[Row],
    *,
    x: str = "global_step",
    axis: str = "",
    joins: bool = False,
) -> list[str]:
    """Return what differs between the rows of a run and those of its calls; W&B's own values are left out.

    Args:
        rows: The rows of the run.
        calls: The row of each call, with its place: once, unless calls make the same row.
        x: Name of the x axis.
        axis: Name of the user's x axis; empty for none.
        joins: Whether several calls at one place, of the same step, may be one row.
    """
    waiting: dict[Any, list[Row]] = defaultdict(list)
    for call in calls:
        waiting[call[x]].append(call)
    differing = []
    for written in rows:
        row = {name: value for name, value in written.items() if not name.startswith("_")}
        here = waiting[row.get(x)]
        parts = [row] if row in here else _parts(row, here, {x, axis}) if joins else []
        for part in parts:
            here.remove(part)
        if not parts:
            differing.append(f"no row of a call, or of more than one: {row}")
    return differing + [f"not in the run: {call}" for left in waiting.values() for call in left]


def _parts(row: Row, calls: Iterable[Row], axes: set[str]) -> list[Row]:
    """Return the calls of which a row consists; none if it has values of others, or only a part of one."""
    rest, parts = {name for name in row if name not in axes}, []
    for call in calls:
        names = call.keys() - axes
        if names <= rest and call.items() <= row.items():
            rest -= names
            parts.append(call)
    return [] if rest else parts
