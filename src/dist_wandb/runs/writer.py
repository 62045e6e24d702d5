"""Write the rows of one rank into its run, also those with a value that W&B cannot write, until the run has ended.

A row of one rank's own may consist of several calls, as with `wandb.Run.log`. Its numbers and text are kept here until
it ends, so that it costs one call of wandb and no other writer of the run comes between its parts. Other values are
passed to wandb at once, as a part of an uncommitted row.

Media and other objects that the script may change become what W&B stores of them when they are logged, on the thread
that logs: the price that they have with wandb alone, on the rank that writes them. Pyplot works on that thread only.

A value for which wandb raises is replaced by its repr (media are left out), with one warning for each name. Before
that, a removed directory for media is created again. `log` already refuses names that cannot be stored.

If wandb's own process dies, another run of the same id is opened on disk. It gets again the rows of the last seconds,
which the file of the lost run may lack: no row is lost, and rows of the last seconds may be in both files. A signal
handler that interrupts this keeps its rows until then. The replacement can be lost in turn. If it cannot be opened, a
`NullRun` takes its place. Only a lost connection has this effect (`wandb_private.has_lost_service`, which in doubt
probes the run by a call without effect).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dist_wandb.errors import DistWandbError
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Notices, warn
from dist_wandb.payloads.scalars import Paths, nested
from dist_wandb.runs import wandb_private
from dist_wandb.runs.definitions import TIME, WRITABLE, MetricDefiner
from dist_wandb.runs.interception import original
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.runs.run_metadata import is_disabled, is_offline
from dist_wandb.runs.wandb_media import AsLogged, is_media, made_of_merged, may_change, with_taken
from dist_wandb.settings.plan import RunPlan
from dist_wandb.settings.reduction import PerRankNames

_T = TypeVar("_T")
_Call: TypeAlias = "tuple[dict[str, Any], bool]"  # of `log`: a row, and whether it ends with this call

_UNSAFE = 4.0  # seconds until a row is certainly on disk; wandb's process flushes every second
_MOST_UNSAFE = 20_000  # rows kept for that time
_REFUSED = "that W&B refused"  # a cause of `RunWriter.lost`
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

    def __init__(
        self,
        run: AnyRun,
        plan: RunPlan,
        step_metric: str | None,  # name of the x axis in every row; `None` for none
        rank: int = 0,
        reopen: Callable[[str, Mapping[str, Any]], AnyRun] = lambda *_: NullRun(),  # on disk, by id and config
        paths: Paths | None = None,  # of the names that are nested in the run
        definer: MetricDefiner | None = None,  # `None`: the session defines no x axis for all names
        other_axis: str | None = None,  # that the session which has opened the run has defined, if it is another one
    ) -> None:
        self.run = run
        self.label: str | None = plan.label
        self.is_primary: bool = plan.primary
        self.has_own_run: bool = plan.run_mode == "new"
        self.step_metric = step_metric
        self.lost: Counter[str] = Counter()  # how many values were accepted and are not in the run, by cause in words
        self.definer = definer
        self._other_axis: dict[str, Any] = {} if other_axis is None else {other_axis: 0}  # with the last position
        self._rank, self._reopen, self._paths = rank, reopen, {} if paths is None else paths
        self._notices = Notices()
        self._warned: set[str] = set()  # names that W&B cannot write
        self._open: _OpenRow | None = None
        self._turn = threading.RLock()  # reentrant: a signal handler may log in the middle of a row
        # Rows, each with its calls of wandb and the time of the last one (`time.monotonic`).
        self._unsafe: deque[tuple[float, list[_Call]]] = deque(maxlen=_MOST_UNSAFE)
        self._passed: list[_Call] = []  # calls of the row that is not committed
        self._replacing = threading.RLock()
        self._replacing_thread: int | None = None
        self.asked_for: Exception | None = None  # an error of the end that the user's settings ask for

    @property
    def has_run(self) -> bool:
        return bool(self.run)

    def as_logged(self, metrics: Mapping[str, Any], per_rank: PerRankNames, step: int) -> Mapping[str, Any]:
        """Return a row with what W&B stores now of values that the script may change, as `write` would write them."""
        row = dict(metrics)
        for name, value in metrics.items():
            if not may_change(value) or not (self.is_primary or per_rank.has(name, is_number=False)):
                continue
            final = name if self.is_primary else f"{self.label}/{name}"
            key = self._paths.get(final, (final,))[-1]  # files are named as with wandb alone, by the innermost name
            store = partial(wandb_private.stored, name=final, key=key, value=value, step=step)
            try:
                found, made = self._retried(store)
                row[name] = AsLogged(made, None if found == final else found)
            except Exception as error:  # of any kind, because values execute their own code
                if _ASKED_FOR in str(error):
                    raise
                del row[name]
                row.update(text := self._as_text(name, value))
                self._warn(name, value, error, is_text=bool(text))
        return row

    def write(self, metrics: Mapping[str, Any], step: int | None, *, commit: bool | None = None) -> None:
        # Without a step, the row has the x axis of its values, if any, and adds to an open row, as with wandb. With
        # ``commit=False`` it stays open. Without values, `None` only ends an open row.
        x = metrics.get(str(self.step_metric)) if step is None else step
        x = x if isinstance(x, (int, float)) else None
        has_turn = self._turn.acquire(timeout=_LONGEST_TURN)
        try:
            before = self._open
            # As in wandb, a call without a step adds to the open row; also one that ends a row without, as a Trainer's
            # rows.
            is_next = before and step not in (None, before.x) and (before.x is not None or commit is False)
            is_given = self.step_metric in metrics or bool(before and not is_next and before.is_given)
            axis = {} if self.step_metric is None or step is None or is_given else {self.step_metric: step}
            values = {**with_taken(metrics), **axis}
            is_empty = not values and commit is None
            if self._other_axis and not is_empty:  # W&B shows no value of a row without it
                self._other_axis = self._other_axis if x is None else dict.fromkeys(self._other_axis, x)
                values = {**self._other_axis, **values}
            if before is not None and (is_empty or is_next):
                self._open = None
                try:
                    self._write({**before.values, TIME: before.time})
                except Exception:  # of W&B
                    self.lost["that W&B refused"] += len(before.values.keys() - {self.step_metric})
                    raise
            if is_empty:
                return
            row, self._open = self._open or _OpenRow(), None
            row.is_given = is_given
            # `a` and `a.b` replace each other when they are nested, in order. W&B would add a mapping, or media, to an
            # earlier mapping of its row. So it gets what came between, too.
            replaced = row.values.keys() & values.keys()
            if not WRITABLE.issuperset(map(type, map(values.get, replaced))):
                passed, row.values = row.values, {}
                self._write(passed, is_end=False)
            row.values = {name: value for name, value in row.values.items() if name not in replaced} | values
            if commit is not False:
                self._write(row.values)
                return
            self._open, row.x, row.time = row, row.x if x is None else x, time.time()
            if not WRITABLE.issuperset(map(type, values.values())):
                passed, row.values = row.values, {}
                self._write(passed, is_end=False)
        finally:
            if has_turn:
                self._turn.release()

    def _write(self, row: Mapping[str, Any], *, is_end: bool = True) -> None:
        def leave_out(name: str, error: Exception) -> None:
            self.lost[_REFUSED] += 1
            self._notices.warn(name, f"{name!r} could not be put together from what the ranks sent: {error!r}")

        if not self.run:
            return
        with made_of_merged(row, leave_out) as made:
            if made is not row and not made.keys() - {self.step_metric, *self._other_axis, TIME}:
                return
            try:
                self._log(dict(made), is_end=is_end)
            except Exception as error:  # noqa: BLE001  # raised again, unless a value is the cause
                self._write_by_value(made, error, is_end=is_end)

    def _write_by_value(self, row: Mapping[str, Any], error: Exception, *, is_end: bool) -> None:
        # wandb raises before it accepts any part of a row. Each value that could be the cause is logged individually,
        # as a part of the uncommitted row; the other values come last and commit the row, unless only the x axis is
        # left.
        doubtful = [name for name, value in row.items() if type(value) not in WRITABLE]
        if not doubtful:
            raise error
        rest = {name: value for name, value in row.items() if name not in doubtful}
        causes: dict[str, Exception] = {}
        for name in doubtful:
            try:
                self._log({name: row[name]}, is_end=False)
            except Exception as cause:  # noqa: BLE001, PERF203  # of any kind, because values execute their own code
                causes[name] = cause
        for name in causes:
            rest.update(self._as_text(name, row[name]))
        if len(causes) < len(doubtful) or rest.keys() - {self.step_metric, *self._other_axis}:
            self._log(rest, is_end=is_end)
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

    # If wandb's own process dies

    def _log(self, row: dict[str, Any], *, is_end: bool = True) -> None:
        # Raises an error of wandb about this row: a value that it cannot write, or no space for a file of the row. The
        # run is intact then, and the row is not written.
        if self.definer is not None:
            row |= self.definer.missing(row)
        call, now = (row, is_end), time.monotonic()

        def log(run: AnyRun) -> None:
            for name, given in self.definer.due(row) if self.definer is not None else ():
                original(run, "define_metric")(name, **given)
            self._pass(run, call)

        try:
            self._retried(log)
        except Exception:
            if self._replacing_thread != threading.get_ident():  # else a signal handler's row: the next run gets it
                raise
        self._passed.append(call)
        if is_end:
            calls, self._passed = self._passed, []
            self._unsafe.append((now, calls))
            while self._replacing_thread is None and self._unsafe and self._unsafe[0][0] < now - _UNSAFE:
                with suppress(IndexError):  # another thread, or a signal handler, was faster
                    self._unsafe.popleft()

    def _pass(self, run: AnyRun, call: _Call) -> None:
        row, is_end = call
        row = nested(row, self._paths) if self._paths else row
        with wandb_private.media_directory():
            original(run, "log")(row, **({} if is_end else {"commit": False}))

    def _retried(self, call: Callable[[AnyRun], _T]) -> _T:
        """Call wandb; if its own process is lost, once more with the run that replaces this one."""
        run = self.run
        try:
            return call(run)
        except Exception as error:
            if not wandb_private.has_lost_service(run, error) or not self.replace(run, error):
                raise
        return call(self.run)

    def finish(self, exit_code: int | None) -> str | None:
        """End the run; return what is missing of it and what to do. Never raises."""
        run = self.run
        try:
            try:
                return finish(run, exit_code)
            except Exception as error:
                if not wandb_private.is_loss_of_service(error):
                    raise
                self.replace(run, error)
            return finish(self.run, exit_code)
        except Exception as error:  # noqa: BLE001  # the training has succeeded
            is_asked_for = getattr(getattr(run, "settings", None), "finish_timeout_raises", False)
            self.asked_for = error if is_asked_for and isinstance(error, TimeoutError) else None
            return f"the run {run.id} could not be ended: {error!r}"

    def replace(self, lost: AnyRun, error: Exception) -> bool:
        """Replace a lost run by one on disk, with the rows it lacks; `False` in a signal handler during that."""
        with self._replacing:
            if self._replacing_thread is not None:
                return False
            if self.run is not lost:
                return True  # another thread was faster
            self._replacing_thread = threading.get_ident()
            try:
                with wandb_private.before_the_end():
                    self._continue_on_disk(lost, error)
            finally:
                self._replacing_thread = None
            return True

    def _continue_on_disk(self, lost: AnyRun, error: Exception) -> None:
        directory = Path(str(lost.dir)).parent
        warn(
            f"Lost wandb's own process on rank {self._rank} ({str(error) or type(error).__name__}). The run {lost.id} "
            f"continues on disk, beside {directory}. Upload both with: dist-wandb sync {directory.parent}"
        )
        wandb_private.tear_down_service_of(lost)
        try:
            self.run = self._reopen(str(lost.id), dict(lost.config))
        except DistWandbError as second:
            self.run = NullRun()
            warn(f"rank {self._rank} cannot write it there: {second}. Further rows are dropped.")
        shortened = 0
        for calls in [*(calls for _, calls in [*self._unsafe]), self._passed]:
            try:
                for call in calls:
                    self._pass(self.run, call)
            except Exception:  # noqa: BLE001, PERF203  # one row's problem must not cost the others; its files may be gone
                shortened += 1
                numbers = {name: value for row, _ in calls for name, value in row.items() if _is_number(value)}
                with suppress(Exception):
                    self._pass(self.run, (numbers, calls[-1][1]))
        if shortened:
            warn(
                f"rank {self._rank} could write only the numbers of {shortened} of the rows lost with wandb's process."
            )


def _is_number(value: Any) -> bool:
    with suppress(Exception):  # values execute their own code
        return isinstance(value.item() if hasattr(value, "item") else value, (int, float))
    return False


def quiet_finish(run: AnyRun, plan: RunPlan, init_arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Limit wandb to warnings where its hint to "wandb sync" is wrong (shared, on disk), or another rank gives it."""
    is_quiet = (plan.has_writers and is_offline(run)) or (plan.is_one_of_several and not plan.announces)
    return wandb_private.with_warnings_alone(init_arguments, on=bool(run) and is_quiet)


def upload_hint(run: AnyRun, plan: RunPlan, topology: Topology) -> str | None:
    """Return a line for one rank on how to upload a shared run on disk; `None` for other runs and ranks."""
    if not run or not plan.has_writers or not plan.announces or is_disabled(run) or not is_offline(run):
        return None
    directory = Path(run.dir).parent.parents[2] if plan.shared else Path(run.dir).parent.parent
    has_nodes = plan.rank_scope == "global" and (topology.num_nodes or 1) > 1
    return (
        f"dist_wandb: the run {run.id} is on disk, in several files{' on all nodes' if has_nodes else ''}. Upload "
        f"{'all of them together' if has_nodes else 'it'} with: dist-wandb sync {directory}"
    )


def finish(run: AnyRun, exit_code: int | None) -> str | None:
    """End a run; return what is missing of it and what to do. Raises `OSError` if wandb's own process is lost."""
    if not hasattr(run, "finish"):  # a mock of a run
        return None
    run.finish(exit_code=exit_code)
    if not run or is_disabled(run):
        return None
    from dist_wandb.wandb_files.debug_log import log_of, untaken, unwritten

    directory = Path(str(run.dir)).parent
    given_up = (unwritten if is_offline(run) else untaken)(log_of(directory))
    if not given_up:
        return None
    reasons = "; ".join(f"{what}: {reason}" for what, reason in given_up.items())
    if is_offline(run):
        return f"not all of the run {run.id} could be written to disk ({reasons}). Missing data is lost."
    return (
        f"W&B's server did not accept all of the run {run.id} ({reasons}). It is on disk. Once the server answers, "
        f"upload it with: dist-wandb sync {directory}"
    )
