"""Definitions of metrics: the x axis of a run, and what the user defines beside it.

The x axis is ours, unless the user defines another one, before or after ours. It is a step metric (`global_step`, for
Lightning `trainer/global_step`), never wandb's `step=`, so late rows are not dropped. For Lightning ``*`` is defined
with `step_sync`, as the stock logger does; otherwise without, so that rows logged outside of a session do not get
``global_step=0``. For a run that was already open, nothing is defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from dist_wandb.runs.interception import original
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.settings.reduction import Definitions, longest_pattern

STEP_METRIC = "global_step"  # name of the x axis of runs, unless an integration uses another one
TIME = "_timestamp"  # W&B's name of the time of a row
WRITABLE = frozenset({float, int, bool, str, type(None)})
_OURS = {"step_metric": STEP_METRIC, "step_sync": False}  # the definition of a name on our axis


class MetricDefiner:
    """The user's definitions of metrics, in a session that has defined an x axis for all names (the pattern ``*``).

    If several patterns match a name, W&B applies an arbitrary one (wandb-core iterates over a Go map) and keeps it: our
    ``*`` could take precedence over a pattern of the user. Therefore each name that matches a user's pattern is defined
    individually, by the longest such pattern, before it is logged for the first time; or before it is logged again, if
    the user defined the pattern later. A ``*`` of the user replaces ours.
    """

    def __init__(self) -> None:
        self._definitions = Definitions()  # that the run has
        self._settled: dict[str, bool] = {}  # by name that was logged or defined: whether that definition is enough
        self._last: dict[str, Any] = {}  # the last value of each of the user's x axes; 0 before the first, as in W&B

    def due(self, row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the names of a row that must be defined before it is logged, with their definitions."""
        due, definitions = list[tuple[str, Mapping[str, Any]]](), self._definitions.given
        for name in [name for name in row if not self._settled.get(name)]:
            pattern = longest_pattern(name, definitions)
            is_left_to_wandb = pattern == "*" and name not in self._settled  # it replaces our pattern
            self._settled[name] = True
            if pattern is not None and not is_left_to_wandb and name not in (STEP_METRIC, TIME):
                given, of_all = definitions[pattern], definitions.get("*", {})
                has_axis = given.get("step_metric") is not None or of_all.get("step_metric") is not None
                due.append((name, given if has_axis else {**given, **_OURS}))
        return due

    def missing(self, row: Mapping[str, Any]) -> dict[str, Any]:
        # W&B adds the last values of x axes to rows of numbers. It stores media under several names (``table.nrows``),
        # of which it knows only patterns: our ``*`` could take precedence, and nothing would be added.
        for axis in self._last.keys() & row.keys():
            self._last[axis] = row[axis] if isinstance(row[axis], Real) else self._last[axis]
        media = [name for name, value in row.items() if type(value) not in WRITABLE] if self._last else []
        patterns = [longest_pattern(name, self._definitions.given) for name in media]
        axes = [self._definitions.axis_of(pattern) for pattern in patterns if pattern is not None]
        return {axis: self._last[axis] for axis in axes if axis in self._last and axis not in row}

    def define(self, define_metric: Any, name: str, given: dict[str, Any]) -> Any:
        is_pattern = name.endswith("*")
        has_no_axis = given.get("step_metric") is None and "step_metric" not in self._definitions.given.get(name, {})
        is_ours = name != STEP_METRIC and longest_pattern(name, self._definitions.given) is None
        if not is_pattern and given and has_no_axis and is_ours:
            given = {**given, **_OURS}  # such as of a summary; an empty definition means another axis
        # First: what wandb refuses must not be repeated for each name, whose rows would be lost.
        defined = define_metric(name, **given)
        self._definitions = self._definitions.followed_by(name, given)
        self._last = {**dict.fromkeys(self._definitions.axes, 0), **self._last}  # another thread logs
        if is_pattern:
            self._unsettle()
        else:
            self._settled[name] = True
        return defined

    def redefine(self, run: Any) -> None:
        define_metric = original(run, "define_metric")
        for name, given in self._definitions.given.items():
            define_metric(name, **given)
        self._unsettle()

    def _unsettle(self) -> None:
        given = self._definitions.given
        self._settled = {name: name in given for name in {*self._settled, *given}}


def define_step_metric(run: AnyRun, step_metric: str) -> None:
    if hasattr(run, "define_metric"):  # a mock of a run may not have it
        run.define_metric(step_metric)
        # With `step_sync`, as in Lightning's own logger, W&B writes the last value into rows without one. All rows that
        # pass through a session have `global_step`, and W&B must not write it into other rows.
        run.define_metric("*", step_metric=step_metric, step_sync=step_metric != STEP_METRIC)
