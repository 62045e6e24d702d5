"""Log rows into a run, and replace it by another run on disk if wandb's own process dies.

States:

1. The run is intact.
2. Replacing: one thread opens another run of the same id, offline, and logs again the rows of the last seconds, which
   the file of the lost run may lack. A signal handler that interrupts this thread keeps its rows until then.
3. The replacement has taken the place of the run, and can be lost in turn. If it cannot be opened, a `NullRun` takes
   its place.

Invariant: each row is logged into one run, and again into its replacement unless it is certainly in the file of the
lost run: no row is lost, and rows of the last seconds may be in both files.

Only a lost connection has this effect (`wandb_private.has_lost_service`, which in doubt probes the run by a call
without effect). Any other error concerns only its row, and `writer` handles it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dist_wandb.errors import DistWandbError
from dist_wandb.job.topology import Topology
from dist_wandb.notices import warn
from dist_wandb.payloads.scalars import Paths, nested
from dist_wandb.runs import wandb_private
from dist_wandb.runs.interception import original
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.runs.run_metadata import is_disabled, is_offline
from dist_wandb.runs.writer import MetricDefiner
from dist_wandb.settings.plan import RunPlan

_UNSAFE = 4.0  # seconds until a row is certainly on disk; wandb's process flushes every second
_MOST_UNSAFE = 20_000  # rows kept for that time
_Call: TypeAlias = "tuple[dict[str, Any], dict[str, Any]]"  # of `log`: a row, and the other arguments


@dataclass(eq=False, repr=False)
class ReplaceableRun:
    """Logs rows into a run or, if that is lost, into the one on disk that `reopen` opens with its id and config."""

    run: AnyRun
    _rank: int
    _reopen: Callable[[str, Mapping[str, Any]], AnyRun]
    _paths: Paths = field(default_factory=dict)  # of the names that are nested in the run
    _definer: MetricDefiner | None = None  # `None`: the session defines no x axis for all names

    def __post_init__(self) -> None:
        # Rows, each with its calls of `log` and the time of the last one (`time.monotonic`).
        self._unsafe: deque[tuple[float, list[_Call]]] = deque(maxlen=_MOST_UNSAFE)
        self._open: list[_Call] = []  # calls of the row that is not committed
        self._lock = threading.RLock()  # a signal handler may log in the middle of the replacement
        self._is_replacing = False
        self.asked_for: Exception | None = None  # an error of the end that the user's settings ask for
        self._late: deque[_Call] = deque()  # by the signal handler during the replacement

    def __bool__(self) -> bool:
        return bool(self.run)

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        """Log a row as `wandb.Run.log` does; if wandb's own process is lost, into another run on disk.

        Raises an error of wandb about this row: a value that it cannot write, or no space for a file of the row. The
        run is intact then, and the row is not written.
        """
        if self._definer is not None:
            row |= self._definer.missing(row)
        run, call, now = self.run, (row, kwargs), time.monotonic()
        try:
            for name, given in self._definer.due(row) if self._definer is not None else ():
                original(run, "define_metric")(name, **given)
            self._log(run, call)
        except Exception as error:
            if not wandb_private.has_lost_service(run, error):
                raise
            if not self.replace(run, error):
                self._late.append(call)
                return
            self._log(self.run, call)
        self._open.append(call)
        if kwargs.get("commit") is False:
            return
        calls, self._open = self._open, []
        self._unsafe.append((now, calls))
        while self._unsafe and self._unsafe[0][0] < now - _UNSAFE:
            with suppress(IndexError):  # another thread, or a signal handler, was faster
                self._unsafe.popleft()

    def _log(self, run: AnyRun, call: _Call) -> None:
        row, arguments = call
        row = nested(row, self._paths) if self._paths else row
        wandb_private.with_media_directory(lambda: original(run, "log")(row, **arguments))

    def stored(self, name: str, value: Any, step: int) -> tuple[str, Any]:
        """As `wandb_private.stored`; files are named as with wandb alone, by the innermost name, and the step."""
        run, key = self.run, self._paths.get(name, (name,))[-1]
        try:
            return wandb_private.with_media_directory(lambda: wandb_private.stored(run, name, key, value, step))
        except Exception as error:
            if not wandb_private.has_lost_service(run, error) or not self.replace(run, error):
                raise
            return wandb_private.stored(self.run, name, key, value, step)

    def finish(self, exit_code: int | None) -> str | None:
        """End the run; return the problem as `finish` does. Never raises."""
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
        with self._lock:
            if self._is_replacing:
                return False
            if self.run is not lost:
                return True  # another thread was faster
            self._is_replacing = True
            try:
                self._continue_on_disk(lost, error)
            finally:
                self._is_replacing = False
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
        rows, shortened = [*(calls for _, calls in [*self._unsafe]), self._open], 0
        while rows or self._late:
            calls = rows.pop(0) if rows else [self._late.popleft()]
            try:
                for call in calls:
                    self._log(self.run, call)
            except Exception:  # noqa: BLE001  # one row's problem must not cost the others; its files may be gone
                shortened += 1
                whole = {name: value for row, _ in calls for name, value in row.items()}
                numbers = {name: value for name, value in whole.items() if _is_number(value)}
                with suppress(Exception):
                    self._log(self.run, (numbers, calls[-1][1]))
        if shortened:
            warn(
                f"rank {self._rank} could write only the numbers of {shortened} of the rows lost with wandb's process."
            )


def _is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or NumPy, or a tensor of one element."""
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
