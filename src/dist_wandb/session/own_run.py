"""This rank's own W&B run while a session uses it: intercepted, replaced if wandb's process dies, and ended.

Users also finish runs themselves, by `run.finish()`, `wandb.finish()`, or a new `wandb.init`, which finishes the last
run. All of these call `finish` of the run object. It is intercepted, so that the session ends first, with the rows that
are still in progress. On a rank without a run, `wandb.finish()` has no effect there: the primary publishes it in the
store, and the sessions without a run end when they poll next. Leaving a ``with wandb.init()`` block calls another
method, `_finish`: it is intercepted to write the row that is still open, and the session is detached.

Of ranks without a run, alerts reach the run (`Alerts`), and files that they save are reported as not saved.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.exchange.rows import Rows
from dist_wandb.job.job_store import SharedList, is_first
from dist_wandb.notices import Notices, warn
from dist_wandb.runs import interception, requested, run_metadata, wandb_private, writer
from dist_wandb.runs.definitions import STEP_METRIC, MetricDefiner
from dist_wandb.runs.null_run import AnyRun, NullRun
from dist_wandb.runs.opening import RunOpener, run_key
from dist_wandb.runs.summary import SummaryWrites
from dist_wandb.runs.writer import RunWriter
from dist_wandb.session import registry
from dist_wandb.session.config.sync import ConfigSync
from dist_wandb.session.job_description import ask
from dist_wandb.session.job_link import JobLink
from dist_wandb.session.notices import print_line
from dist_wandb.settings.reduction import check_patterns, check_per_rank

if TYPE_CHECKING:
    from dist_wandb.session.intake import Intake

_log = logging.getLogger("dist_wandb")

_SAVING = ("save", "log_artifact", "log_model", "log_code")
_FETCHING = ("use_artifact", "use_model")
_PARAMETERS = ("step_metric", "step_sync", "hidden", "summary", "goal", "overwrite")  # of define_metric, by position


class Alerts:
    """The alerts of a unit's ranks. Equal ones of several ranks are sent once, as if the script had one process.

    A rank without a run appends its alerts to a list in the job's store. The unit's primary reads the list when the
    exchange reports that some rank has published something, and before it ends the run: without alerts it is free.
    """

    def __init__(self, link: JobLink, config_sync: ConfigSync, run: Callable[[], AnyRun]) -> None:
        self._link, self._run = link, run
        self._connection = config_sync.connection
        self._list: SharedList | None = None  # once it is used
        self._given: Counter[tuple[str, str, str]] = Counter()  # by this rank: title, text and level, and how often
        self._sent = Notices()  # by this primary
        self._published = 0.0  # as of the last `deliver`

    def deliver(self, published: float = math.inf) -> None:
        """Send other ranks' alerts to this rank's run, if any rank has `published` since (infinity: in any case)."""
        if published == self._published or self._link.plan.run_mode != "auto" or not self._run():
            return
        try:
            found = self._shared()
            new = [] if found is None else found.read_new()
            if found is None or len(found.values) >= found.count():  # else the store has not answered: read again
                self._published = published
        except RendezvousError as error:
            _log.debug("dist_wandb: rank %d cannot read alerts: %s", self._link.topology.global_rank, error)
            return
        for (title, text, level), number, wait in new:
            if self._sent.is_first((title, text, level, number)):
                try:
                    send = interception.original(self._run(), "alert")
                    send(title, text, level=level or None, wait_duration=wait)
                except Exception as error:  # noqa: BLE001  # must not affect the training
                    warn(f"an alert of another rank could not be sent: {title!r}: {error!r}")

    def alert(self, send: Any, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        """Handle an alert of the script: `send` it, or leave it for the primary."""
        # The errors of `wandb.Run.alert`, also if another rank has sent it.
        if getattr(level, "value", level or "INFO") not in ("INFO", "WARN", "ERROR"):
            raise ValueError("level must be one of 'INFO', 'WARN', or 'ERROR'")
        if wait_duration and not isinstance(wait_duration, (int, float, timedelta)):
            raise TypeError("wait_duration must be an int, float, or datetime.timedelta")
        alert = str(title), str(text or ""), str(getattr(level, "value", level) or "")
        self._given[alert] += 1
        if self._run():
            if self._sent.is_first((*alert, self._given[alert])):
                send(title, text, level, wait_duration)
            return
        wait = wait_duration.total_seconds() if isinstance(wait_duration, timedelta) else wait_duration
        try:
            shared = self._shared()
            if shared is not None:
                shared.append((alert, self._given[alert], wait))
                self._connection.publications += 1
                return
            problem: object = "this process has no store of the job, as before init_process_group and in a fork"
        except RendezvousError as error:
            problem = error
        warn(
            f"the alert {alert[0]!r} of rank {self._link.topology.global_rank} did not reach the rank that has the "
            f"run: {problem}."
        )

    def _shared(self) -> SharedList | None:
        store = self._connection.store() if self._connection.is_usable else None
        if store is None:
            self._list = None
        elif self._list is None:
            self._list = SharedList(store, f"alerts/{run_key(self._link.plan)}")
        return self._list

    def close(self) -> None:
        self._list = None  # which holds a connection to the store


@dataclass(eq=False, repr=False)
class OwnRun:
    """The run that this rank writes into, or a `NullRun`; on a rank without one, what is done instead."""

    opened: InitVar[AnyRun]
    link: JobLink
    opener: RunOpener  # to publish the run, and to reopen it if wandb's own process dies
    config_sync: ConfigSync
    _attached: AnyRun  # the unit's run, if this rank only records the hardware of its node in it
    is_owned: bool  # whether the session may end the run: not if it was open before
    step_metric: str | None  # the x axis
    first_row: int  # position on it of the first row without a step, after those of a continued run
    other_axis: str | None = None  # the x axis of the session that has opened the run, if it is another one

    def __post_init__(self, opened: AnyRun) -> None:
        is_disabled = requested.mode_if_given(self.opener.arguments) == "disabled"
        # Whether it takes all that is logged, as wandb's disabled run; not a mock.
        self.takes_all: bool = is_disabled or (bool(opened) and getattr(opened, "disabled", None) is True)
        self.summary: SummaryWrites = SummaryWrites(self.step_metric)
        self.alerts: Alerts = Alerts(self.link, self.config_sync, lambda: self.run)
        definer = MetricDefiner() if self.is_owned and self.has_our_axis else None
        link, rank, paths = self.link, self.link.topology.global_rank, self.summary.paths
        self.writer: RunWriter = RunWriter(
            opened, link.plan, self.step_metric, rank, self._reopen, paths, definer, self.other_axis
        )
        self._notices = Notices()
        self._intercept: Callable[[AnyRun], None] = lambda _: None
        self._restore: list[Callable[[], None]] = []
        self.config_sync.own.replace_run = self.writer.replace
        self.config_sync.attach(opened, link.plan, link.unit.name)

    @property
    def run(self) -> AnyRun:
        return self.writer.run

    @property
    def has_our_axis(self) -> bool:
        """Whether the x axis is the one that this package defines and counts rows on."""
        return self.step_metric == STEP_METRIC

    def rows(self) -> Rows:
        options = self.link.options
        return Rows(
            self.writer,
            options.reductions,
            check_per_rank(options.per_rank),
            check_patterns("spread", options.spread),
            partial(getattr, self.summary, "definitions"),
            self.summary.keep,
            self.summary.act,
            counts=self.has_our_axis,
            first=self.first_row,
            rank=self.link.topology.global_rank,
            index=self.link.unit.index,
        )

    def intercept(self, log: Callable[..., None], finish: Callable[[int | None], None], intake: Intake) -> None:
        """Redirect calls on the run, direct or through wandb: to `log`, and to `finish` before the run's own."""

        def intercept(run: AnyRun) -> None:
            begun: list[bool] = []

            def finish_first(finish_run: Any, exit_code: int | None = None, **kwargs: Any) -> None:
                if not begun:
                    begun.append(True)  # `finish` of a run calls another of its methods, which a block calls directly
                    finish(exit_code)
                if not wandb_private.is_finished(run):
                    finish_run(exit_code=exit_code, **kwargs)

            def teardown(end_runs: Any, exit_code: int | None = None) -> None:
                finish(exit_code)
                end_runs(exit_code)

            rows = {} if run and self.takes_all else {"log": interception.logs_first(log)}
            its_block = {wandb_private.FINISH: finish_first} if run else {}
            handlers: dict[str, Callable[..., Any]] = {"finish": finish_first, **rows, **its_block}
            handlers |= {"define_metric": partial(self._define, run, intake), **self._elsewhere(run, intake)}
            module = sys.modules.get("wandb")
            if hasattr(module, "teardown"):  # it ends runs without their `_finish`
                self._restore.append(interception.intercept(module, "teardown", teardown))
            replaced = interception.intercept_methods(run, handlers, is_current=self.opener.is_current)
            self._restore += [replaced, *self.summary.follow(run), *wandb_private.adapt(run, lambda: intake.step)]
            if isinstance(run, NullRun):
                run.show(_step=lambda: intake.step, _is_over=lambda: not intake.is_open)

        self._intercept = intercept
        intercept(self.run)

    def _define(
        self, run: AnyRun, intake: Intake, define_metric: Any, name: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Check a definition now, and carry it out after the rows of the calls before it, if there are any.

        A rank without a run tells the others which names are x axes, too: it may be ahead of the one that has it.
        """
        if not isinstance(name, str):  # wandb refuses it, unless the run is disabled
            return define_metric(*[name] * (name is not None), *args, **kwargs)
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        its_own = partial(define_metric, name, **given)
        definer = self.writer.definer
        action = its_own if definer is None else partial(definer.define, define_metric, name, given)
        is_possible, metric = wandb_private.checked_definition(run, its_own) if run and intake.rows else (False, None)
        if is_possible:
            self.summary.put_off(lambda _: action())
        else:
            metric = action()  # first: wandb may refuse it
        if not run:
            self.summary.put_off(lambda run: run.define_metric(name, **given), ("define", name))
        self.summary.define(name, given)
        return metric

    def restore(self) -> None:
        self.alerts.close()
        while self._restore:
            self._restore.pop()()

    def report(self) -> None:
        """Publish to the other ranks that the run is open, and the position of its first row without a step."""
        self.opener = replace(self.opener, job_store=self.link.store)
        url = run_metadata.url(self.run) if self.run else self.link.run_url()
        writer = self.link.unit.index
        self.opener.publish(url, offline=not run_metadata.is_online(self.run), writer=writer, first_row=self.first_row)

    def raise_asked_for(self) -> None:
        error, self.writer.asked_for = self.writer.asked_for, None
        if error is not None:
            raise error

    def end(self, exit_code: int | None) -> bool:
        """End the run; return whether data of it is lost."""
        if self._attached:
            with suppress(Exception):  # only this node's system metrics are lost
                writer.finish(self._attached, exit_code)
        with writer.quiet_finish(self.run, self.link.plan, self.opener.arguments):
            problem = self.writer.finish(exit_code)
        if problem:
            warn(f"rank {self.link.topology.global_rank}: {problem}")
        upload_hint = writer.upload_hint(self.run, self.link.plan, self.link.topology)
        if upload_hint is not None:
            print_line(upload_hint, self.run)  # instead of wandb's own hint
        plan, run = self.link.plan, self.run
        if plan.shared and not plan.primary and run and run_metadata.is_offline(run) and self.link.run_url():
            warn(
                f"what rank {self.link.topology.global_rank} has logged of the run {run.id} is only on its disk, "
                "while the run is online. Give all ranks the same mode (WANDB_MODE). Upload it with: dist-wandb sync "
                f"{Path(run.dir).parent.parents[2]}"
            )
        return bool(problem) and bool(run) and run_metadata.is_offline(run)

    def _reopen(self, run_id: str, config: Mapping[str, Any]) -> AnyRun:
        run = self.opener.again(run_id, config, self.step_metric)
        wandb_private.set_starting_step(run, run_metadata.starting_step(self.run))
        self.config_sync.attach(run, self.link.plan, self.link.unit.name)
        self._intercept(run)
        if self.writer.definer is not None and run:
            self.writer.definer.redefine(run)
        registry.process_end.register()  # so that it runs before the end of wandb's new process
        return run

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Give whatever was logged, also after the end, to the summary of a disabled run."""
        run = self.run
        take = run.summary.update if isinstance(run, NullRun) else interception.original(run, "log")
        take(dict(metrics))

    def _elsewhere(self, run: AnyRun, intake: Intake) -> dict[str, Callable[..., Any]]:
        """Return handlers of methods by name: of a rank without a run, and for such ranks."""
        if self.takes_all:
            return {}
        if not run:
            return {"alert": self.alerts.alert, **{name: partial(self._report, name) for name in _SAVING + _FETCHING}}

        def take(log_now: Any, data: Any, step: Any = None, commit: Any = None, **others: Any) -> None:
            if step is None and wandb_private.is_watched(data, commit):
                intake.watch(data)
            else:
                log_now(data, step, commit, **others)

        has_others = self.link.topology.world_size > 1 and self.link.plan.run_mode == "auto"
        return {**({"alert": self.alerts.alert} if has_others else {}), wandb_private.LOG: take}

    def _report(self, name: str, do_nothing: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Report a call without effect, on the first rank of the unit that makes it."""
        if self._notices.is_first(name):
            rank, unit = self.link.topology.global_rank, self.link.unit
            key = f"{run_key(self.link.plan)}/without a run/{name}"
            primary = unit.ranks[0] if unit.is_member else self.link.topology.coordinator
            if ask(self.link.store, lambda store: is_first(store, key), otherwise=True):
                warn(
                    f"rank {rank} called {name}, which returns nothing there, because only rank {primary} has a run. "
                    f"Read it with wandb.Api().artifact(...), which every rank can, or on rank {primary} only."
                    if name in _FETCHING
                    else f"rank {rank} called {name}, which saves nothing there, because only rank {primary} has a "
                    "run. If each rank has files of its own, such as a part of a checkpoint, pass run_mode='shared' "
                    f"to save those of all ranks. If not, call {name} on rank {primary} only."
                )
        return do_nothing(*args, **kwargs)
