"""The x axis of a run's metrics: ours, unless the user defines another one, before or after ours.

It is a step metric (`global_step`, for Lightning `trainer/global_step`), never wandb's `step=`, so late rows are not
dropped. For Lightning ``*`` is defined with `step_sync`, as the stock logger does; otherwise without, so that rows
logged outside of a session do not get ``global_step=0``. For a run that was already open, nothing is defined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dist_wandb.runs.interception import original

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.runs.record import Record

STEP_METRIC = "global_step"
"""Name of the x axis of runs, unless an integration uses another one."""
_PARAMETERS = ("step_metric", "step_sync", "hidden", "summary", "goal", "overwrite")  # of define_metric, by position


class Axes:
    """Passes rows to a record, in a session that has defined an x axis for all names (the pattern ``*``).

    If several patterns match a name, W&B applies an arbitrary one (wandb-core iterates over a Go map) and keeps it: our
    ``*`` could take precedence over a pattern of the user. Therefore each name that matches a user's pattern is defined
    individually, by the longest such pattern, before it is logged for the first time; or before it is logged again, if
    the user defined the pattern later. A ``*`` of the user replaces ours.
    """

    def __init__(self, record: Record, axis: str) -> None:
        self._record = record
        self._axis = axis  # ours
        self._ours = {"step_metric": axis, "step_sync": False}
        self._patterns: dict[str, dict[str, Any]] = {}  # the user's definitions of patterns
        self._exact: dict[str, dict[str, Any]] = {}  # the user's definitions of single names
        self._seen: set[str] = set()  # logged names
        self._settled: set[str] = set()  # names that need no further definition

    def __bool__(self) -> bool:
        return bool(self._record)

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        """Define those names of a row that need it, then log the row."""
        if self._patterns:
            for name in row:
                if name not in self._settled:
                    self._settle(name)
        self._seen.update(row)
        self._record.log(row, **kwargs)

    def define(self, define_metric: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a definition by the user, and pass it to `define_metric`, the original method of the run."""
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        if isinstance(name, str) and name.endswith("*"):
            self._patterns = {**self._patterns, name: given}  # another thread logs
            self._settled = set(self._exact)
        elif isinstance(name, str):
            given = self._on_our_axis(name, given)
            self._exact = {**self._exact, name: {**self._exact.get(name, {}), **given}}
            self._settled.add(name)
        return define_metric(name, **given)

    def redefine(self, run: Any) -> None:
        """Repeat the user's definitions for a run that replaces the first."""
        define_metric = original(run, "define_metric")
        for name, given in (*self._patterns.items(), *self._exact.items()):
            define_metric(name, **given)
        self._settled = set(self._exact)

    def _on_our_axis(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Add our x axis to a definition without one, such as of a summary. An empty definition means another axis."""
        has_no_axis = given.get("step_metric") is None and "step_metric" not in self._exact.get(name, {})
        is_ours = name != self._axis and self._pattern(name) is None
        return {**given, **self._ours} if given and has_no_axis and is_ours else given

    def _settle(self, name: str) -> None:
        self._settled.add(name)
        pattern = self._pattern(name)
        is_left_to_wandb = pattern == "*" and name not in self._seen  # it replaces our pattern
        if pattern is None or is_left_to_wandb or name in (self._axis, "_timestamp", *self._steps()):
            return
        given, of_all = self._patterns[pattern], self._patterns.get("*", {})
        if given.get("step_metric") is None and of_all.get("step_metric") is None:
            given = {**given, **self._ours}
        original(self._record.run, "define_metric")(name, **given)

    def _pattern(self, name: str) -> str | None:
        """Return the user's longest pattern that matches."""
        matching = [pattern for pattern in self._patterns if name.startswith(pattern.removesuffix("*"))]
        return max(matching, key=len, default=None)

    def _steps(self) -> Iterator[Any]:
        """Return the names of the user's x axes."""
        steps = (given.get("step_metric") for given in (*self._patterns.values(), *self._exact.values()))
        return (getattr(step, "name", step) for step in steps)  # wandb also accepts what define_metric returned


def define_step_metric(run: AnyRun, step_metric: str) -> None:
    """Make `step_metric` the x axis of every metric for which the user defines no other one."""
    if hasattr(run, "define_metric"):  # a mock of a run may not have it
        run.define_metric(step_metric)
        # With `step_sync`, as in Lightning's own logger, W&B writes the last value into rows without one. All rows that
        # pass through a session have `global_step`, and W&B must not write it into other rows.
        run.define_metric("*", step_metric=step_metric, step_sync=step_metric != STEP_METRIC)


def define_tensorboard_steps(run: AnyRun) -> None:
    """Make the steps of tensorboard the x axis of every metric, as Lightning's own logger does."""
    if hasattr(run, "define_metric"):
        run.define_metric("*", step_metric="global_step")
