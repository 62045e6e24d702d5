"""Write the rows of one rank into its run, including rows with a value that W&B cannot write.

A row of one rank's own may consist of several calls, as with `wandb.Run.log`. Its numbers and text are kept here until
it ends, so that it costs one call of wandb and no other writer of the run comes between its parts. Other values are
passed to wandb at once, as a part of an uncommitted row.

Media and other objects that the script may change become what W&B stores of them when they are logged, on the thread
that logs: the price that they have with wandb alone, on the rank that writes them. Pyplot works on that thread only.

A value for which wandb raises is replaced by its repr (media are left out), with one warning for each name. Before
that, a removed directory for media is created again. `log` already refuses names that cannot be stored.

The x axis is ours, unless the user defines another one, before or after ours. It is a step metric (`global_step`, for
Lightning `trainer/global_step`), never wandb's `step=`, so late rows are not dropped. For Lightning ``*`` is defined
with `step_sync`, as the stock logger does; otherwise without, so that rows logged outside of a session do not get
``global_step=0``. For a run that was already open, nothing is defined.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

from dist_wandb.notices import Notices, warn
from dist_wandb.runs.interception import original
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.runs.wandb_media import AsLogged, is_media, made_of_merged, may_change, with_taken
from dist_wandb.settings.plan import RunPlan
from dist_wandb.settings.reduction import Definitions, PerRankNames, longest_pattern

if TYPE_CHECKING:
    from dist_wandb.runs.replaceable_run import ReplaceableRun

STEP_METRIC = "global_step"  # name of the x axis of runs, unless an integration uses another one
_OURS = {"step_metric": STEP_METRIC, "step_sync": False}  # the definition of a name on our axis

_TIME = "_timestamp"  # W&B's name of the time of a row
_REFUSED = "that W&B refused"  # a cause of `RunWriter.lost`
_WRITABLE = frozenset({float, int, bool, str, type(None)})
_LONGEST = 1000  # characters of a repr
_ASKED_FOR = "Table row limit exceeded"  # of an error that wandb raises only if the user's settings ask for it
_MOST_WARNED = 10  # names with a warning, in case they change from row to row
_LONGEST_TURN = 1.0  # seconds to wait for another thread: a signal handler that waits for us may have interrupted it


@dataclass
class _OpenRow:
    """A row to which further calls may add values."""

    x: float | None = None  # its position on the x axis, if it is known
    is_given: bool = False  # whether one of the calls has a value of the x axis among its values
    values: dict[str, Any] = field(default_factory=dict)  # those that were not passed to wandb yet
    time: float = 0.0  # when the last of them was logged, in seconds since the epoch


class RunWriter:
    """Writes the rows of one rank into its run, or none if that is a `NullRun`. The plan determines the names."""

    def __init__(self, run: AnyRun | ReplaceableRun, plan: RunPlan, step_metric: str | None, rank: int = 0) -> None:
        self.label: str | None = plan.label
        self.is_primary: bool = plan.primary
        self.has_own_run: bool = plan.run_mode == "new"
        self._run = run
        self.step_metric = step_metric  # name of the x axis in every row; `None` for none
        self.lost: Counter[str] = Counter()  # how many values were accepted and are not in the run, by cause in words
        self._rank = rank
        self._notices = Notices()
        self._warned: set[str] = set()  # names that W&B cannot write
        self._open: _OpenRow | None = None
        self._turn = threading.RLock()  # reentrant: a signal handler may log in the middle of a row

    @property
    def has_run(self) -> bool:
        return bool(self._run)

    def as_logged(self, metrics: Mapping[str, Any], per_rank: PerRankNames, step: int) -> Mapping[str, Any]:
        """Return a row with what W&B stores now of values that the script may change, as `write` would write them."""
        row, run = dict(metrics), cast("ReplaceableRun", self._run)
        for name, value in metrics.items():
            if not may_change(value) or not (self.is_primary or per_rank.has(name, is_number=False)):
                continue
            final = name if self.is_primary else f"{self.label}/{name}"
            try:
                found, made = run.stored(final, value, step)
                row[name] = AsLogged(made, None if found == final else found)
            except Exception as error:  # of any kind, because values execute their own code
                if _ASKED_FOR in str(error):
                    raise
                del row[name]
                row.update(text := self._as_text(name, value))
                self._warn(name, value, error, is_text=bool(text))
        return row

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        """Write a row, or add to the row that earlier calls left open. A call at another step ends that row first.

        Without a step, the row has the x axis of its values, if any, and adds to an open row, as with wandb.
        ``commit=False`` leaves the row open; otherwise it is written. Without values, `None` only ends an open row.
        Tables and images of the ranks that W&B refuses are left out, with a warning.
        """
        x = metrics.get(str(self.step_metric)) if step is None else step
        x = x if isinstance(x, (int, float)) else None
        has_turn = self._turn.acquire(timeout=_LONGEST_TURN)
        try:
            before = self._open
            # As in wandb, a call without a step adds to the open row; also one that ends a row without, as a Trainer's
            # rows.
            if before is not None and step not in (None, before.x) and (before.x is not None or commit is False):
                self._end(before)
            is_given = self.step_metric in metrics or (self._open is not None and self._open.is_given)
            axis = {} if self.step_metric is None or step is None or is_given else {self.step_metric: step}
            values = {**with_taken(metrics), **axis}
            if not values and commit is None:
                if self._open is not None:
                    self._end(self._open)
                return
            row, self._open = self._open or _OpenRow(), None
            row.is_given = is_given
            self._replace(row, values)
            if commit is not False:
                self._write(row.values)
                return
            self._open, row.x, row.time = row, row.x if x is None else x, time.time()
            if not _WRITABLE.issuperset(map(type, values.values())):
                passed, row.values = row.values, {}
                self._write(passed, commit=False)
        finally:
            if has_turn:
                self._turn.release()

    def _replace(self, row: _OpenRow, values: Mapping[str, Any]) -> None:
        """Keep values for a row behind earlier ones: `a` and `a.b` replace each other when they are nested, in order.

        W&B would add a mapping, or media, to an earlier mapping of its row. So it gets what came between, too.
        """
        replaced = row.values.keys() & values.keys()
        if not _WRITABLE.issuperset(map(type, map(values.get, replaced))):
            passed, row.values = row.values, {}
            self._write(passed, commit=False)
        for name in replaced & row.values.keys():
            del row.values[name]
        row.values.update(values)

    def _end(self, row: _OpenRow) -> None:
        self._open = None
        self._write({**row.values, _TIME: row.time})

    def _write(self, row: Mapping[str, Any], **arguments: Any) -> None:
        """Log a row, unless nothing is left of it."""

        def leave_out(name: str, error: Exception) -> None:
            self.lost[_REFUSED] += 1
            self._notices.warn(name, f"{name!r} could not be put together from what the ranks sent: {error!r}")

        if not self._run:
            return
        with made_of_merged(row, leave_out) as made:
            if made is not row and not made.keys() - {self.step_metric, _TIME}:
                return
            try:
                self._run.log(dict(made), **arguments)
            except Exception as error:  # noqa: BLE001  # raised again, unless a value is the cause
                self._write_by_value(made, error, arguments)

    def _write_by_value(self, row: Mapping[str, Any], error: Exception, arguments: Mapping[str, Any]) -> None:
        """Write a row after `log` with these arguments has raised `error`; raise it if no value is the cause.

        wandb raises before it accepts any part of a row. Each value that could be the cause is logged individually, as
        a part of the uncommitted row; the other values come last and commit the row, unless only the x axis is left.
        """
        doubtful = [name for name, value in row.items() if type(value) not in _WRITABLE]
        if not doubtful:
            raise error
        rest = {name: value for name, value in row.items() if name not in doubtful}
        causes: dict[str, Exception] = {}
        for name in doubtful:
            try:
                self._run.log({name: row[name]}, commit=False)
            except Exception as cause:  # noqa: BLE001, PERF203  # of any kind, because values execute their own code
                causes[name] = cause
        for name in causes:
            rest.update(self._as_text(name, row[name]))
        if len(causes) < len(doubtful) or rest.keys() - {self.step_metric}:
            self._run.log(rest, **arguments)
        self.lost[_REFUSED] += len(causes.keys() - rest.keys())
        for name, why in causes.items():
            self._warn(name, row[name], why, is_text=name in rest)

    def _as_text(self, name: str, value: Any) -> dict[str, str]:
        if not is_media(value):  # the repr of media is useless
            with suppress(Exception):
                return {name: repr(value)[:_LONGEST].encode(errors="replace").decode()}
        return {}

    def _warn(self, name: str, value: Any, cause: Exception, *, is_text: bool) -> None:
        if name in self._warned or len(self._warned) > _MOST_WARNED:
            return
        self._warned.add(name)
        rank, kind = self._rank, type(value).__name__
        if len(self._warned) > _MOST_WARNED:
            warn(f"W&B cannot write {name!r} ({kind}) on rank {rank} either. Further names are not reported.")
            return
        done = "Its repr is written" if is_text else "It is left out"
        warn(
            f"W&B cannot write {name!r} on rank {rank}, of type {kind}: {cause!r}. {done}; the rest of its row is "
            "written. Log numbers, text, lists or W&B's media."
        )


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
            if pattern is not None and not is_left_to_wandb and name not in (STEP_METRIC, _TIME):
                given, of_all = definitions[pattern], definitions.get("*", {})
                has_axis = given.get("step_metric") is not None or of_all.get("step_metric") is not None
                due.append((name, given if has_axis else {**given, **_OURS}))
        return due

    def missing(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the x axes that a row lacks, with their last values, as W&B adds them to rows of numbers.

        W&B stores media under several names (``table.nrows``), of which it knows only patterns: our ``*`` could take
        precedence, and nothing would be added.
        """
        for axis in self._last.keys() & row.keys():
            self._last[axis] = row[axis] if isinstance(row[axis], Real) else self._last[axis]
        media = [name for name, value in row.items() if type(value) not in _WRITABLE] if self._last else []
        patterns = [longest_pattern(name, self._definitions.given) for name in media]
        axes = [self._definitions.axis_of(pattern) for pattern in patterns if pattern is not None]
        return {axis: self._last[axis] for axis in axes if axis in self._last and axis not in row}

    def define(self, define_metric: Any, name: str, given: dict[str, Any]) -> Any:
        """Pass a definition by the user to `define_metric`, the original method of the run, and record it.

        In this order: what wandb refuses must not be repeated for each name, whose rows would be lost.
        """
        is_pattern = name.endswith("*")
        has_no_axis = given.get("step_metric") is None and "step_metric" not in self._definitions.given.get(name, {})
        is_ours = name != STEP_METRIC and longest_pattern(name, self._definitions.given) is None
        if not is_pattern and given and has_no_axis and is_ours:
            given = {**given, **_OURS}  # such as of a summary; an empty definition means another axis
        defined = define_metric(name, **given)
        self._definitions = self._definitions.followed_by(name, given)
        self._last = {**dict.fromkeys(self._definitions.axes, 0), **self._last}  # another thread logs
        if is_pattern:
            self._unsettle()
        else:
            self._settled[name] = True
        return defined

    def redefine(self, run: Any) -> None:
        """Repeat the user's definitions for a run that replaces the first."""
        define_metric = original(run, "define_metric")
        for name, given in self._definitions.given.items():
            define_metric(name, **given)
        self._unsettle()

    def _unsettle(self) -> None:
        given = self._definitions.given
        self._settled = {name: name in given for name in {*self._settled, *given}}


def define_step_metric(run: AnyRun, step_metric: str) -> None:
    """Make `step_metric` the x axis of every metric for which the user defines no other one."""
    if hasattr(run, "define_metric"):  # a mock of a run may not have it
        run.define_metric(step_metric)
        # With `step_sync`, as in Lightning's own logger, W&B writes the last value into rows without one. All rows that
        # pass through a session have `global_step`, and W&B must not write it into other rows.
        run.define_metric("*", step_metric=step_metric, step_sync=step_metric != STEP_METRIC)
