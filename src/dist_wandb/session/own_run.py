"""This rank's own W&B run while a session uses it: intercepted, replaced if wandb's process dies, and ended.

Users also finish runs themselves, by `run.finish()`, `wandb.finish()`, or a new `wandb.init`, which finishes the last
run. All of these call `finish` of the run object. It is intercepted, so that the session ends first, with the rows that
are still in progress. On a rank without a run, `wandb.finish()` has no effect there: the primary publishes it in the
store, and the sessions without a run end when they poll next. Leaving a ``with wandb.init()`` block calls another
method, `_finish`: it is intercepted to write the row that is still open, and the session is detached.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.runs import interception, null_run, record, requested, run_metadata, wandb_private
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.record import Record
from dist_wandb.runs.summary import SummaryWrites
from dist_wandb.runs.writer import STEP_METRIC, Axes, RunWriter
from dist_wandb.session import registry
from dist_wandb.session.elsewhere import Elsewhere
from dist_wandb.session.notices import print_line
from dist_wandb.settings.reduction import check_per_rank

if TYPE_CHECKING:
    from typing_extensions import Self

    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.runs.opening import Opening
    from dist_wandb.session.config.sync import ConfigSync
    from dist_wandb.session.intake import Intake
    from dist_wandb.session.job_link import JobLink

_log = logging.getLogger("dist_wandb")

_FOR_USERS = ("config", "finish", "flush", "group_url", "id", "log", "plan", "run", "timed", "topology", "url")


class OwnRun:
    """The run that this rank writes into, or a `NullRun`."""

    def __init__(
        self,
        run: AnyRun,
        link: JobLink,
        opening: Opening,  # to publish the run, and to reopen it if wandb's own process dies
        config_sync: ConfigSync,
        *,
        is_owned: bool,  # whether the session may end the run: not if it was open before
        step_metric: str | None,  # the x axis
        attached: AnyRun,  # the unit's run, if this rank only records the hardware of its node in it
    ) -> None:
        self.is_owned = is_owned
        self.user_axes: tuple[str, ...] = ()  # names that the user has made x axes of other metrics
        self.summary: SummaryWrites = SummaryWrites()
        self._link = link
        self._opening = opening
        self._config_sync = config_sync
        self._attached = attached
        is_disabled = requested.mode_if_given(opening.arguments) == "disabled"
        takes_all = is_disabled or (bool(run) and getattr(run, "disabled", None) is True)  # not for a mock
        self.step_metric: str | None = step_metric
        # whether the x axis is the one that this package defines and counts rows on
        self.has_our_axis: bool = step_metric == STEP_METRIC
        self.elsewhere: Elsewhere = Elsewhere(link, lambda: self.run, takes_all=takes_all)
        self._record = Record(run, link.topology.global_rank, self._reopen, self.summary.logged.paths)
        self._axes = Axes(self._record) if is_owned and self.has_our_axis else None
        target = self._record if self._axes is None else self._axes
        self.writer: RunWriter = RunWriter(target, link.plan, step_metric, link.topology.global_rank)
        self._intercept: Callable[[AnyRun], None] = lambda _: None
        self._restore: list[Callable[[], None]] = []
        config_sync.on_lost(self._record.replace)
        config_sync.attach(run, link.plan, link.unit.name)

    @property
    def run(self) -> AnyRun:
        """The run. It changes if wandb's own process had to be replaced."""
        return self._record.run

    @property
    def directory(self) -> Path:
        """The directory that contains the run directories of the job."""
        return requested.wandb_directory(self._opening.arguments)

    @property
    def is_current(self) -> bool:
        """Whether ``wandb.run`` may be this run: ``reinit="create_new"`` leaves it alone."""
        return self._opening.is_current

    @property
    def starting_step(self) -> int:
        """The step of the first row: after those of a run that is continued. On a rank without a run, its primary's."""
        step: object = getattr(self.run, "starting_step", 0)
        return step if isinstance(step, int) else 0

    def as_logged(self, metrics: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """Return a row with what W&B stores now of values that the script may change; see `RunWriter.as_logged`."""
        if not wandb_private.can_store(self.run):
            return metrics
        per_rank = check_per_rank(self._link.options.per_rank)
        return self.writer.as_logged(metrics, per_rank, step, self._record.stored, self.summary.logged.paths)

    def intercept(self, log: Callable[..., None], finish: Callable[[int | None], None], intake: Intake) -> None:
        """Redirect calls on the run, direct or through wandb: to `log`, and to `finish` before the run's own."""

        def intercept(run: AnyRun) -> None:
            def finish_first(finish_run: Any, exit_code: int | None = None, **kwargs: Any) -> None:
                finish(exit_code)
                if not wandb_private.is_finished(run):
                    finish_run(exit_code=exit_code, **kwargs)

            def define(define_metric: Any, *args: Any, **kwargs: Any) -> Any:
                return self._define(run, bool(intake.rows), define_metric, *args, **kwargs)

            def end_row_first(finish_run: Any, *args: Any, **kwargs: Any) -> None:
                with suppress(Exception):  # the run is lost
                    self.writer.write({}, None)
                finish_run(*args, **kwargs)

            rows = {} if run and self.elsewhere.takes_all else {"log": interception.logs_first(log)}
            handlers: dict[str, Callable[..., Any]] = {"finish": finish_first, **rows}
            handlers.update(self.elsewhere.handlers(run, intake.watch))
            module = sys.modules.get("wandb")
            handlers["define_metric"] = define
            if run:
                handlers[wandb_private.FINISH] = end_row_first
            if run and hasattr(module, "teardown"):  # it ends runs without their `_finish`
                self._restore.append(interception.intercept(module, "teardown", end_row_first))
            replaced = interception.intercept_methods(run, handlers, is_current=self._opening.is_current)
            self._restore += [replaced, self.summary.follow(run)]
            self._restore.append(wandb_private.answer_step(run, lambda: intake.step))
            self._restore += [*wandb_private.log_tables_unasked(run), wandb_private.let_imports_pass(run)]
            if isinstance(run, NullRun):
                run.show_step(lambda: intake.step)
                self._restore.append(interception.serve(run, is_current=self._opening.is_current))

        self._intercept = intercept
        intercept(self.run)

    def _define(
        self, run: AnyRun, has_rows: bool, define_metric: Any, name: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Check a definition now, and carry it out after the rows of the calls before it, if there are any.

        A rank without a run tells the others which names are x axes, too: it may be ahead of the one that has it.
        """
        if name is None:  # wandb refuses it, unless the run is disabled
            return define_metric(*args, **kwargs)
        axis = kwargs.get("step_metric", args[0] if args else None)
        axis = getattr(axis, "name", axis)  # wandb also accepts what define_metric returned
        if isinstance(axis, str) and axis != self.step_metric and axis not in self.user_axes:
            self.user_axes = (*self.user_axes, axis)  # another thread reads it
        self.summary.logged.note_definition(name, kwargs.get("summary"))
        if not run:
            return self.summary.define_aside(define_metric, name, *args, **kwargs)
        its_own = partial(define_metric, name, *args, **kwargs)
        action = its_own if self._axes is None else partial(self._axes.define, define_metric, name, *args, **kwargs)
        is_possible, metric = wandb_private.checked_definition(run, its_own) if has_rows else (False, None)
        if not is_possible:
            return action()
        self.summary.put_off(action)
        return metric

    def restore(self) -> None:
        """Undo `intercept`."""
        while self._restore:
            self._restore.pop()()

    def report(self, first_row: int) -> None:
        """Publish to the other ranks that the run is open, and the position of its first row without a step."""
        self._opening = replace(self._opening, job_store=self._link.store)
        url = run_metadata.url(self.run) if self.run else self._link.run_url()
        writer = self._link.unit.index
        self._opening.publish(url, offline=not run_metadata.is_online(self.run), writer=writer, first_row=first_row)

    def raise_asked_for(self) -> None:
        """Raise an error of the run's end that the user's settings ask for, once."""
        error, self._record.asked_for = self._record.asked_for, None
        if error is not None:
            raise error

    def end(self, exit_code: int | None) -> bool:
        """End the run; return whether data of it is lost."""
        if self._attached:
            with suppress(Exception):  # only this node's system metrics are lost
                record.finish(self._attached, exit_code)
        with record.quiet_finish(self.run, self._link.plan, self._opening.arguments):
            problem = self._record.finish(exit_code)
        if problem:
            _log.warning("dist_wandb: rank %d: %s", self._link.topology.global_rank, problem)
        upload_hint = record.upload_hint(self.run, self._link.plan, self._link.topology)
        if upload_hint is not None:
            print_line(upload_hint)  # instead of wandb's own hint
        plan, run = self._link.plan, self.run
        if plan.shared and not plan.primary and run and run_metadata.is_offline(run) and self._link.run_url():
            _log.warning(
                "dist_wandb: what rank %d has logged of the run %s is only on its disk, while the run is online. Give "
                "all ranks the same mode (WANDB_MODE). Upload it with: dist-wandb sync %s",
                *(self._link.topology.global_rank, run.id, Path(run.dir).parent.parents[2]),
            )
        return bool(problem) and bool(run) and run_metadata.is_offline(run)

    def _reopen(self, run_id: str, config: Mapping[str, Any]) -> AnyRun:
        """Reopen the run on disk, with the same id and the given config."""
        run = self._opening.again(run_id, config, self.step_metric)
        wandb_private.set_starting_step(run, self.starting_step)
        self._config_sync.attach(run, self._link.plan, self._link.unit.name)
        self._intercept(run)
        if self._axes is not None and run:
            self._axes.redefine(run)
        registry.process_end.register()  # so that it runs before the end of wandb's new process
        return run


class AsRun:
    """Looks up undefined attributes on the run, and sets on it what users set of a run."""

    if TYPE_CHECKING:
        _intake: Intake
        _own: OwnRun
        log: Callable[..., None]

        @property
        def run(self) -> AnyRun:
            """The run."""

    @property
    def step(self) -> int:
        """The step of the next row of this rank, as with wandb: after ``log(..., step=200)`` 200, as its row is open.

        Without steps, it is the number of rows that this rank has logged, after those of a run that is continued.
        """
        return self._intake.step

    @property
    def starting_step(self) -> int:
        """The step of the first row of this start: 0, or after the last step of a run that is continued.

        On a rank without a run it is the primary's; the first read waits for it, up to `join_timeout`.
        """
        return self._own.starting_step

    def _log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """`log` under the name that W&B's own integrations call."""
        self.log(data, step, commit=commit)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        """Return the session itself, as wandb does for a run: models that hold it are copied."""
        return self

    def __getattr__(self, name: str) -> Any:
        is_private = name.startswith("_")
        if "_own" not in self.__dict__ or (is_private and not null_run.is_private_name(name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.run, name, null_run.NullPart()) if is_private else getattr(self.run, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in null_run.SETTABLE:
            setattr(self.run, name, value)  # on a rank without a run it is only read back: the primary sets it
        else:
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*_FOR_USERS, *null_run.public_names(self.run)})
