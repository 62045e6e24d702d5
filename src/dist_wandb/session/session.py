"""What every door holds: one job's topology, plan, run and exchange, from `init` to `finish`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from dist_wandb.config.sync import ConfigSync
from dist_wandb.errors import ConfigurationError, DistWandbError, RendezvousError
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.direct import DirectExchange
from dist_wandb.exchange.interface import WITHOUT_FINISH, Exchange, end_all
from dist_wandb.exchange.membership.membership import is_accompanied, keys_of, say_opened
from dist_wandb.exchange.rows import Contribution, Rows, calls_at
from dist_wandb.payloads.checks import check_row, checked_step
from dist_wandb.payloads.media.gathers import Gathered
from dist_wandb.payloads.scalars import Weight, take, take_weight
from dist_wandb.relay.relay import Relay
from dist_wandb.relay.remote_session import RemoteSession
from dist_wandb.restart import resuming
from dist_wandb.restart.next_row import next_row
from dist_wandb.restart.store import RestartStore
from dist_wandb.runs import (
    argument_checks,
    axes,
    console,
    finishing,
    interception,
    job_arguments,
    null_run,
    requested,
    run_metadata,
    wandb_media,
    wandb_private,
)
from dist_wandb.runs.axes import Axes
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.opening import Opening, run_key, writer_keys
from dist_wandb.runs.record import Record
from dist_wandb.runs.writer import RunWriter
from dist_wandb.session.announcement import announcement
from dist_wandb.session.ends import FAILED, Ending, Once, ProcessEnd, exit_code_of
from dist_wandb.session.places import Place, here, is_notebook
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.limits import DEFAULT_LIMITS, Limits
from dist_wandb.settings.options import (
    OPTION_NAMES,
    ConfigSyncMode,
    Current,
    Options,
    SystemMetrics,
    around,
)
from dist_wandb.settings.plan import (
    RankScope,
    RunMode,
    RunPlan,
    needs_base_id,
    needs_layout,
    plan_run,
    tells_job,
    unit_of,
    unit_run_id,
)
from dist_wandb.settings.reduction import PerRank, Reduce, Spread, check_per_rank, check_spread
from dist_wandb.store import leftovers
from dist_wandb.store.job_store import BASE_ID, JobStore, agree_on_base_id, id_of_job, learn_layout, make_id, refuse
from dist_wandb.store.timed_caller import STORE_PATIENCE, briefly
from dist_wandb.topology.detected import detected_launchers, doubts_of
from dist_wandb.topology.model import Topology
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from dist_wandb.runs.null_run import AnyRun, Run

_log = logging.getLogger("dist_wandb")

STEP_METRIC = axes.STEP_METRIC
_JOB = "job"
_LEAST_TO_END = 2.0  # seconds that other ranks get to end with a run, however long its last rows were waited for


class Session:
    """One rank's part in the W&B logging of a job. Made by `dist_wandb.init`, and by the doors for the frameworks.

    What is not found on the session is looked up on its W&B run, so ``session.summary``, ``session.watch`` and the like
    work as on a `wandb.Run`; on a rank without a run they do nothing.

    Args:
        options: The checked arguments of the door.
        topology: Who this rank is.
        plan: What this rank does with W&B.
        run: The run that the plan opened, or a `NullRun`.
        owns_run: Whether `finish` may end the run: not if it was there before.
        step_metric: Name of the x axis; `None` for none.
        job_store: The job's store, where there is one.
        name: Name of the session, equal on all ranks.
        first_row: Place on the x axis of the first row without a step: behind those of a run that is continued.
        restart_store: Keeps the record by which a later start finds the runs, on the rank that tells the job.
        opening: How the run was opened: to tell others of it, and to open it again should wandb's own process die.
        attached: The unit's run where this rank only records the hardware of its node in it.
        config_sync: This rank's part in the config of all ranks.
        is_counted: Whether no other session will have this name: its number was counted, not given.

    Attributes:
        opened_inside: The session of the decorated function in which this one was opened, if any.
        brings_together: Whether the numbers of several ranks become one: if not, every rank's row is its own.
    """

    def __init__(
        self,
        options: Options,
        topology: Topology,
        plan: RunPlan,
        run: AnyRun,
        *,
        owns_run: bool = True,
        step_metric: str | None = STEP_METRIC,
        job_store: JobStore | None = None,
        name: str = "",
        first_row: int = 0,
        restart_store: RestartStore | None = None,
        opening: Opening | None = None,
        attached: AnyRun | None = None,
        config_sync: ConfigSync | None = None,
        is_counted: bool = False,
    ) -> None:
        self.options = options
        self.topology = topology
        self.plan = plan
        self.owns_run = owns_run
        self._record = Record(run, topology.global_rank, self._reopened)
        self._opening = opening
        self._step_metric = step_metric
        self._job_store = job_store
        self._name = name
        self._first_row = first_row
        self._restart_store = restart_store
        self._config_sync = config_sync or ConfigSync(options, topology, None)
        self._pid = os.getpid()
        self._axes = Axes(self._record, STEP_METRIC) if owns_run and step_metric == STEP_METRIC else None
        self._unit = unit_of(topology, options.rank_scope)
        self._row_maker = Rows(
            RunWriter(self._record if self._axes is None else self._axes, plan, step_metric, topology.global_rank),
            options.reductions,
            check_per_rank(options.per_rank),
            counts=step_metric == STEP_METRIC,
            first=first_row,
            rank=topology.global_rank,
            is_first=not self._unit.index,
        )
        self._attached = attached or NullRun()
        self._config_sync.reach_by(self._find_store)
        self._config_sync.on_lost(self._record.replace)
        self._config_sync.ended_by(self._has_ended)
        self._config_sync.attach(run, plan, self._unit.name)
        self._exchange = self._make_exchange()
        self.opened_inside = entered()
        self._place: Place | None = None  # where `init` opened it
        self._is_block = False
        self._relay = Relay(self._from_child)
        self._remote: RemoteSession | None = None
        self._facts_for_forks: dict[str, Any] = {}
        self._rows = 0
        self._last_step: int | None = None  # that this rank gave
        self._first_thread = 0  # that logged here
        self._counting = threading.RLock()  # several threads may log; one that is interrupted may log again
        self._failure: int | None = None
        self._let_be: list[Callable[[], None]] = []  # take back what goes to this session first
        self._ends_once = Once()
        self._is_over = False
        self._is_counted = is_counted
        self._has_told_of_vain_rows = False
        self._has_told_of_own_rows = False

    def start(self) -> None:
        """Begin to take part: complete only now, as other threads look at the session from here on."""
        _sessions.append(self)
        _first_session.has_begun = True
        _process_end.register()
        self._exchange.start()
        self._go_first(self.run)

    def give_up(self) -> None:
        """End at once, as the session could not be opened whole: nobody holds it who could."""
        self._finish(FAILED, _LEAST_TO_END, failed=True)

    @property
    def run(self) -> AnyRun:
        """The W&B run of this rank, or a `NullRun`. Another one if wandb's own process had to be replaced."""
        return self._record.run

    @property
    def id(self) -> str | None:
        """Id of the W&B run that this rank's numbers go to.

        On a rank that opens no run it is the id that its primary told. If the primary has not opened its run yet, this
        waits for it up to `join_timeout`; `None` if it never does.
        """
        if os.getpid() != self._pid:
            return self._elsewhere().id
        if self.run:
            return str(self.run.id)
        try:
            return unit_run_id(self._plan_with_base_id())
        except RendezvousError:
            return None

    @property
    def url(self) -> str | None:
        """Address of that run in W&B; `None` offline, and as long as the primary has not told it."""
        if os.getpid() != self._pid:
            return self._elsewhere().url
        if self.run:
            return run_metadata.url(self.run)
        job_store = self._job_store
        told = briefly(lambda: job_store.try_get(run_key(self.plan)), None) if job_store is not None else None
        return told.get("url") if told else None  # a primary that could not open its run told why instead

    @property
    def group_url(self) -> str | None:
        """Address of the page of this run's group in W&B; `None` offline, and for a run without a group."""
        return run_metadata.group_url(self.run, self.plan.group)

    @property
    def config(self) -> Any:
        """The run's config; on a rank without a run, that of the run which its primary has.

        There it reads the same, a heartbeat later at most. The first read waits for the primary to open its run, up to
        `join_timeout`; if it never does, it reads what this rank was given. What is written there does not reach the
        run: it shows on this rank, until the primary sets another value.

        Example:
            Two ranks, ``run_mode="auto"``, ``config={"lr": 0.1}``::

                session.config["lr"]  # rank 0: 0.1; rank 1, which has no run: 0.1
                if rank == 0:
                    session.config.update({"lr": 0.2}, allow_val_change=True)
                session.config.lr  # rank 0: 0.2; rank 1: 0.2 within a heartbeat
        """
        return self.run.config if os.getpid() == self._pid else self._elsewhere().config

    @contextmanager
    def unchanged_config(self) -> Iterator[Any]:
        """The config, into which nothing comes from other ranks meanwhile: to write what is not there."""
        with self._config_sync.undisturbed():
            yield self.config

    def log(
        self,
        metrics: Mapping[str, Any],
        step: int | None = None,
        weight: Weight = None,
        *,
        commit: bool | None = None,
    ) -> None:
        """Log one row. Never waits for other ranks, nor for a device.

        The numbers that the ranks of a unit log under one name at one step become one number, by `reduce`; it is
        written as soon as all of them are there. Without a step, the k-th number of a name on each rank belong
        together. What is no number (text, media, tables, lists, vectors) goes into the primary's row as it is there,
        and in a shared run from the other ranks under their labels. Tables and images of all ranks are logged with
        `dist_wandb.gathered`.

        Args:
            metrics: Values by name: numbers of Python and numpy, tensors of one element on any device, metrics and
                metric collections of torchmetrics that are not computed, and whatever `wandb.Run.log` takes.
            step: Place of the row on the x axis (`global_step`). With `None` the row lies at the last step that this
                rank gave, and as long as it gave none, at the number of calls.
            weight: What a mean over ranks is weighted with, such as the number of samples behind the values: one
                number, or a mapping of names to numbers. 1 where it is not given. With 0 this rank has no part in it.
            commit: As in `wandb.Run.log`, where one rank is a unit; between ranks rows form by step.

        Raises:
            ConfigurationError: `metrics` is no mapping, a name is no text, a `DTensor` has only a part of its elements
                on this rank, the step is no integer or negative, or a weight is negative or not finite.

        Note:
            While the session is open, ``run.log`` of its W&B run comes here too, and so does ``wandb.log``, where
            ``wandb.run`` is that run; on a rank without a run, ``wandb.log`` if wandb is imported by then.

        Example:
            Two ranks, ``run_mode="shared"``::

                run.log({"loss": 0.4}, step=1, weight=3)  # rank 0: writes loss=0.45 and rank-0/loss=0.4
                run.log({"loss": 0.6}, step=1, weight=1)  # rank 1: writes rank-1/loss=0.6
        """
        if os.getpid() != self._pid:
            self._elsewhere().log(metrics, step, weight, commit=commit)
        else:
            self._log(metrics, step, weight, commit)

    def _log(
        self,
        metrics: Mapping[str, Any],
        step: int | None,
        weight: Weight,
        commit: bool | None,
        *,
        leads: bool = True,
    ) -> None:
        """Log a row of this process.

        Args:
            metrics: As in `log`.
            step: Likewise.
            weight: Likewise.
            commit: Likewise.
            leads: Whether later rows without a step go on at the step of this one.
        """
        rank = self.topology.global_rank
        check_row(metrics, rank)
        for value in metrics.values():
            if isinstance(value, Gathered):
                value.use(rank, wandb_media.image)
        if step is not None:
            step = checked_step(step, rank)
        with self._counting:
            if leads:
                self._last_step = self._step_of(metrics, step, self._last_step)
            if self.brings_together:
                self._put(metrics, step, weight)
            else:
                self._put_straight(metrics, step, weight, commit)
            if commit is not False:  # a row that is not committed goes on in the next call
                self._rows += 1

    def _put_straight(self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None) -> None:
        """Hand over a row that is this rank's own."""
        rank = self.topology.global_rank
        metrics = take(metrics, rank, flat=self.plan.label is not None)
        if weight is not None:
            take_weight(weight, rank)
        if self._unit.size > 1 and any(isinstance(value, Gathered) for value in metrics.values()):
            self._tell_of_own_rows()
        if step is None and self._step_metric == STEP_METRIC and STEP_METRIC not in metrics:
            step = self._first_row + self._rows if self._last_step is None else self._last_step
        self._exchange.put(Contribution(metrics, step, commit))

    def _step_of(self, metrics: Mapping[str, Any], step: int | None, otherwise: int | None) -> int | None:
        """The step that a row gives, also as a value of the x axis."""
        if step is None and self._step_metric is not None:
            step = metrics.get(self._step_metric)
        return step if type(step) is int and step >= 0 else otherwise

    def _tell_of_vain_row(self) -> None:
        if not self._has_told_of_vain_rows:
            self._has_told_of_vain_rows = True
            _log.warning(
                "dist_wandb: rank %d logs, but the run it logs to was finished on the rank that has it. What it logs "
                "from now on is not written.",
                self.topology.global_rank,
            )

    def _from_child(self, metrics: Mapping[str, Any], step: int | None, weight: Weight, commit: bool | None) -> None:
        self._log(metrics, step, weight, commit, leads=False)

    def _put(self, metrics: Mapping[str, Any], step: int | None, weight: Weight) -> None:
        """Hand what this rank says to the exchange."""
        if self._is_over:
            self._tell_of_vain_row()
            return
        if self not in _sessions:
            raise ConfigurationError(
                f"log was called on rank {self.topology.global_rank} after the session was finished. Log before "
                "finish(), or open another session."
            )
        rank = self.topology.global_rank
        values = take(metrics, rank)
        if step is None and self._step_metric in values and type(values[self._step_metric]) is int:
            step = checked_step(values.pop(self._step_metric), rank)
        calls = self._rows if self._last_step is None else calls_at(self._last_step)
        own_weight = None if weight is None else take_weight(weight, rank)
        thread = threading.get_ident()  # what children log comes by threads of its own
        self._first_thread = self._first_thread or thread
        in_order = thread == self._first_thread
        self._exchange.put(Contribution(values, step, None, own_weight, calls, in_order))

    def _tell_of_own_rows(self) -> None:
        """Say once that tables and images are not gathered, as nothing is."""
        if self.plan.run_mode == "auto":
            raise ConfigurationError(
                f"Rank {self.topology.global_rank} logs a table or images of all ranks, but with reduce=None nothing "
                "is brought together: what the other ranks give would be lost. Leave reduce out, or gather out."
            )
        if not self._has_told_of_own_rows and self.plan.announces:
            _log.warning(
                "dist_wandb: with run_mode=%r and no reduction nothing is brought together, so tables and images that "
                "are logged to be gathered have the rows of one rank only, in the run or under the label of each. To "
                "gather them, pass reduce='mean'.",
                self.plan.run_mode,
            )
        self._has_told_of_own_rows = True

    def flush(self, timeout: float | None = None, *, together: bool = False) -> bool:
        """Wait until all that was logged is handed to W&B.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            together: Whether all ranks flush at this point of the script: then it ends once all have come to it, and
                what only other ranks logged is handed over as well.

        Returns:
            Whether all that this rank logged is, together with what the other ranks logged for the same rows.
        """
        if os.getpid() != self._pid:
            return self._elsewhere().flush(timeout)
        self._config_sync.catch_up()
        return self._exchange.flush(timeout, together=together)

    def finish(self, exit_code: int | None = None) -> None:
        """End this rank's part; on a rank with a run, end the run. May be called again, to no effect.

        The other writers of a shared run end before its primary, which waits for them up to `finish_timeout`. A run
        gets the exit code of the first rank of its unit that failed. A rank that fails waits for nobody.

        Args:
            exit_code: Exit code of the job as W&B is to show it; `None` or 0 for success.
        """
        self._finish(exit_code, self.options.limits.flush_timeout)

    def fail(self, exit_code: int | None) -> None:
        """Say how the run is to end, should nobody call `finish` with an exit code.

        Args:
            exit_code: Exit code of the job as W&B is to show it; `None` or 0 if a failure was overcome.
        """
        self._failure = exit_code or None

    def _go_first(self, run: AnyRun) -> None:
        """Have come to this session what is called on its run by itself, or by a function of wandb's."""
        handlers: dict[str, Callable[..., Any]] = {"finish": partial(self._on_finish, run), "log": self._on_log}
        if self._axes is not None and run:
            handlers["define_metric"] = self._axes.define
        self._let_be.append(interception.intercept_methods(run, handlers))

    def _let_run_be(self) -> None:
        while self._let_be:
            self._let_be.pop()()

    def _on_log(
        self, _log_by_itself: Any, data: Any, step: Any = None, commit: bool | None = None, **_of_old: Any
    ) -> None:
        """Take a row that somebody logs into the run by itself."""
        self.log(data, step, commit=commit)

    def _on_finish(self, run: AnyRun, finish: Any, exit_code: int | None = None, **kwargs: Any) -> None:
        self._finish_with_run(exit_code)
        if not wandb_private.is_finished(run):
            finish(exit_code=exit_code, **kwargs)

    def _finish_with_run(self, exit_code: int | None = None) -> None:
        """Finish, as the user finishes the run by itself. On ranks without a run that reaches nobody: tell them."""
        within, began = self.options.limits.flush_timeout, time.monotonic()
        if self._job_store is not None and self.run and self.plan.primary and not self.plan.shared:
            if not exit_code and self._is_accompanied():
                self._exchange.flush()  # with what other ranks have yet to say for the same rows
            briefly(self._config_sync.tell_of_end, None)
            within = max(within - (time.monotonic() - began), min(within, _LEAST_TO_END))
        self._finish(exit_code, within)

    def _is_accompanied(self) -> bool:
        """Whether other ranks of the unit have opened their sessions."""
        job_store, keys = self._job_store, keys_of(self._unit)
        return job_store is not None and briefly(lambda: is_accompanied(job_store.below(keys)), True)

    def _look(self) -> None:
        """Now and then, on the thread of the exchange."""
        self._config_sync.look()
        if self._config_sync.knows_of_end and not self._is_over:
            self._is_over = True
            self._exchange.retire()
            self._forget()
            self._leave_keys()

    def _finish(self, exit_code: int | None, within: float, *, failed: bool | None = None) -> None:
        patience = within + (self.options.limits.upload_timeout if failed is None else 0.0)
        if os.getpid() != self._pid or not self._ends_once.begins(patience):
            return
        try:
            if self in _sessions:
                self._end(exit_code, within, failed=failed)
                self._leave_keys()
        finally:
            self._ends_once.ends()
            self._let_run_be()

    def _end(self, exit_code: int | None, within: float, *, failed: bool | None) -> None:
        failed = bool(self._failure) or (bool(exit_code) if failed is None else failed)  # then nobody is waited for
        exit_code = exit_code or self._failure or exit_code
        deadline = time.monotonic() + within
        ending = self._ending()
        exit_code = ending.tell(exit_code)
        self._hand_over(failed=failed, within=within)
        with _process_end.finishing():
            if self.owns_run and not self.plan.primary:
                self._end_run(exit_code)
                ending.tell_written()
            elif self.owns_run:
                exit_code = self._finish_last(ending, exit_code, None if failed else deadline)
                self._tell_how_to_upload()
            if not exit_code:
                self._take_back_note()
        self._tell_over()
        _let_sigterm_be()

    def _tell_how_to_upload(self) -> None:
        line = finishing.upload_hint(self.run, self.plan, self.topology)
        if line is not None and not console.is_silent():
            print(line, file=sys.stderr, flush=True)  # noqa: T201  # in place of wandb's own

    def _tell_over(self) -> None:
        job_store = self._job_store
        if job_store is not None and tells_job(self.topology):
            briefly(lambda: leftovers.tell_over(job_store), None)

    def _has_ended(self) -> bool:
        """Whether the leading rank has ended this session, which this rank opens too late."""
        job_store = self._job_store
        if job_store is None or tells_job(self.topology) or self.options.rank_scope != "global":
            return False
        return briefly(lambda: leftovers.is_over(job_store), False)

    def _leave_keys(self) -> None:
        """See to it that what was set for this session is deleted.

        Where the door gave the session its number, the same keys may be needed again: a logger may open it anew.
        """
        job_store, exchange = self._job_store, self._exchange
        if job_store is None or not self._is_counted:
            return
        self._is_counted = False
        if isinstance(exchange, CollectiveExchange) and exchange.is_only_one:
            briefly(lambda: job_store.delete(job_store.own_keys), None)  # who comes now finds that it is over
        else:
            leftovers.leave(job_store, lambda: exchange.has_ended)

    def _ending(self) -> Ending:
        return Ending(None if self.plan.run_mode == "new" else self._job_store, self._unit)

    def _take_back_note(self) -> None:
        """No later start is to continue runs that have ended well."""
        if self._restart_store is not None:
            briefly(self._restart_store.take_back, None)

    def _finish_last(self, ending: Ending, exit_code: int | None, deadline: float | None) -> int | None:
        """End the run as its primary: after its other writers, and with the exit code of the first that failed.

        Args:
            ending: What the ranks tell each other.
            exit_code: This rank's.
            deadline: Until when the other writers are waited for; `None` if they are not.

        Returns:
            The run's exit code.
        """
        if deadline is not None:
            lost = self._exchange.lost
            if self.plan.has_writers and not ending.await_writers(deadline, self._writers(deadline) - lost):
                _log.warning(
                    "dist_wandb: rank %d did not wait longer for the other ranks to end their part of the run %s. What "
                    "they write from now on may be missing. See finish_timeout.",
                    self.topology.global_rank,
                    self.plan.run_id,
                )
            exit_code = exit_code or ending.exit_code(lost) or exit_code
        self._end_run(exit_code)
        return exit_code

    def _writers(self, deadline: float) -> set[int]:
        """Indices in the unit of the other ranks that write into its run, as far as the store tells it in time.

        Args:
            deadline: Until when, by the monotonic clock: without an answer the run would end before its writers.
        """
        job_store, keys = self._job_store, dict(enumerate(writer_keys(self.plan, self._unit)))
        if job_store is None:
            return set()
        none: set[int] = set()
        within = max(STORE_PATIENCE, deadline - time.monotonic())
        attached = briefly(lambda: {index for index, key in keys.items() if job_store.has([key])}, none, within)
        return attached - {self._unit.index}

    def _end_run(self, exit_code: int | None) -> None:
        if self._attached:
            with suppress(Exception):  # only system metrics of this node, which training needs not
                finishing.finish(self._attached, exit_code)
        with finishing.quiet_finish(self.run, self.plan, self._opening.arguments if self._opening is not None else {}):
            problem = self._record.finish(exit_code)
        if problem:
            _log.warning("dist_wandb: rank %d: %s", self.topology.global_rank, problem)

    def opened_at(self, place: Place) -> None:
        """Remember that `init` opened this session, and where in the script."""
        self._place = place

    def may_end_before(self, place: Place, *, in_notebook: bool) -> bool:
        """Whether `init` at `place` is to finish this session: it opened it there before, and not as a block.

        Args:
            place: Where `init` is called.
            in_notebook: Whether the place does not matter, as cells are changed and run again.
        """
        is_ours = os.getpid() == self._pid and self._place is not None and self.opened_inside is entered()
        if not is_ours or self._is_block or (place != self._place and not in_notebook):
            return False
        if not in_notebook and self.plan.announces:
            _log.warning(
                "dist_wandb: init is called again at %s, where it has opened the run %s, which is not finished: it is "
                "now. Call finish() where a run is to end; for several runs at a time pass reinit='create_new'.",
                place.line,
                self.id,
            )
        return True

    def release(self, *, failed: bool = False, within: float | None = None) -> None:
        """Hand over what was logged and be no longer the current session, but leave the run open for others.

        Args:
            failed: Whether to wait for no other rank.
            within: How long to wait, in seconds; `None` for `finish_timeout`.
        """
        if os.getpid() == self._pid:  # not in a fork
            self._hand_over(failed=failed, within=within)
            self._let_run_be()

    def _hand_over(self, *, failed: bool, within: float | None) -> None:
        deadline = time.monotonic() + (self.options.limits.flush_timeout if within is None else within)
        self._relay.close(failed=failed)
        if not failed:
            self._config_sync.catch_up()
        self._exchange.close(max(0.0, deadline - time.monotonic()), failed=failed)
        self._config_sync.let_go()
        self._forget()
        self._tell_of_unused_patterns()

    def end_with_process(self, exit_code: int, *, failed: bool) -> None:
        """Finish, as the process ends and nobody has.

        Args:
            exit_code: Of the process.
            failed: Whether it ends in the middle of its work.
        """
        try:
            self._finish(exit_code, min(self.options.limits.flush_timeout, WITHOUT_FINISH), failed=failed)
        except Exception:  # noqa: BLE001  # other sessions must end as well
            _log.exception("dist_wandb: the run of rank %d could not be ended", self.topology.global_rank)

    def catch_sigterm(self) -> None:
        """Let SIGTERM end the runs of this process before it ends the process, unless somebody else handles it."""
        _process_end.catch_sigterm()

    def retire(self) -> None:
        """Be no longer a session: its run was finished behind its back, so nothing can be written."""
        if os.getpid() != self._pid:
            self._forget()
            return
        self._exchange.retire()
        self._config_sync.let_go()
        self._forget()
        self._let_run_be()
        self._ending().tell_written()
        self._take_back_note()
        self._leave_keys()
        _let_sigterm_be()

    def _forget(self) -> None:
        if os.getpid() == self._pid:
            self._relay.close(failed=True)  # to no effect where it has been closed in peace
        with suppress(ValueError):  # another thread may be about to do the same
            _sessions.remove(self)

    def announce(self, where: str | None = None) -> None:
        """Say in one line, on a unit's primary, what was decided and where the runs are.

        Args:
            where: Where this rank's run is; found out if `None`.
        """
        if self.plan.announces and not console.is_silent():
            plan = replace(self.plan, run_id=self.id)  # in a world of one W&B has made the id
            line = announcement(
                self.topology, plan, where or run_metadata.location(self.run, self.plan), self.group_url
            )
            print(line, file=sys.stderr, flush=True)  # noqa: T201  # as wandb's own messages: seen without set-up

    @property
    def has_met(self) -> bool:
        """Whether this rank has a store through which it meets the others; a world of one meets nobody."""
        return self._job_store is not None or self.topology.world_size == 1

    def meet(self, init_arguments: Mapping[str, Any], door: str, number: int) -> None:
        """Tell the other ranks of the job, if this session was opened before there was a store to tell it through."""
        _, self._job_store = _meet(self.options, self.topology, door, number)
        if self._job_store is not None and tells_job(self.topology):
            self._job_store.publish(BASE_ID, self.plan.base_id)
            _tell_job(self.options, self._job_store, init_arguments)
        if self._job_store is not None:
            say_opened(self._job_store.below(keys_of(self._unit)), self._unit)
        if self._opening is not None:
            self._opening = replace(self._opening, job_store=self._job_store)
            self.tell_of_run()

    def tell_of_run(self) -> None:
        """Tell other ranks of this rank's run, as far as there is a store."""
        if self._opening is not None:
            is_online = run_metadata.is_online(self.run)
            self._opening.tell(self.url, offline=not is_online, writer=self._unit.index, first_row=self._first_row)

    def _make_exchange(self) -> Exchange:
        self.brings_together = self._unit.size > 1 and self.options.reductions is not None
        if not self.brings_together:
            awaits_writers = self.plan.shared and self._job_store is not None and run_metadata.is_online(self.run)
            return DirectExchange(
                self._row_maker,
                self.options.limits,
                self.topology.global_rank,
                at_once=self.topology.world_size == 1,
                has_all_writers=self._has_all_writers if awaits_writers else None,
            )
        spread = check_spread(self.options.spread)
        return CollectiveExchange(
            self._unit,
            self._find_store,
            self._row_maker,
            self.options.limits,
            spread,
            self._look,
            self._has_ended,
        )

    def _has_all_writers(self) -> bool:
        job_store, keys = self._job_store, writer_keys(self.plan, self._unit)
        return job_store is None or briefly(lambda: job_store.has(keys), True)  # the job may be over

    def _find_store(self) -> JobStore | None:
        if self._job_store is not None:
            return self._job_store
        return JobStore.find(self._name, self.topology, self.options.limits.join_timeout)

    def _reopened(self, run_id: str, config: Mapping[str, Any]) -> AnyRun:
        """The run once more, on disk, with the id and the config that it had."""
        run = self._opening.again(run_id, config, self._step_metric) if self._opening is not None else NullRun()
        self._config_sync.attach(run, self.plan, self._unit.name)
        self._go_first(run)
        if self._axes is not None and run:
            self._axes.redefine(run)
        _process_end.register()  # to come before the end of wandb's new process
        return run

    def _tell_of_unused_patterns(self) -> None:
        unused = [pattern for pattern in self._row_maker.unused if pattern != "*"]
        if unused and self.brings_together and self._rows and self.plan.primary:
            message = (
                f"reduce has patterns that decided about no name that was logged: {', '.join(map(repr, unused))}. Look "
                "for a misspelt name, or an earlier pattern that matches the same names."
            )
            warn(message, users_line(), may_raise=False)  # the run has yet to end

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, such as a spawned worker, what hands over to this one what is logged there."""
        if os.getpid() != self._pid:
            return self._elsewhere().__reduce__()
        return RemoteSession, (self._relay.open(), self.topology, self._facts())

    def _facts(self, *, waits: bool = True) -> dict[str, Any]:
        """What other processes are told of the run; without waiting, what is known of it."""
        if self.run or waits:
            return {"id": self.id, "url": self.url, "config": dict(given_values(self.config))}
        return {"id": self.plan.run_id, "url": None, "config": self._config_sync.known()}

    def _elsewhere(self) -> RemoteSession:
        """This session in a fork of its process."""
        if self._remote is None:
            self._remote = RemoteSession(self._relay.address, self.topology, self._facts_for_forks)
        return self._remote

    def prepare_fork(self) -> None:
        """Be ready to take what a fork of this process logs."""
        if os.getpid() == self._pid:
            self._relay.open()
            self._facts_for_forks = self._facts(waits=False)

    def after_fork(self) -> None:
        """In the fork, let go of what only the process of the session is to hold."""
        self._relay.let_go()

    def __enter__(self) -> Self:
        self._is_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish; with the exit code that the exception means, if there is one."""
        self.finish(exit_code_of(error))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_record" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.run, name)

    def __dir__(self) -> list[str]:
        return sorted({*_FOR_USERS, *null_run.public_names(self.run)})

    def _repr_html_(self) -> str:
        """For notebooks: the run's page, as wandb shows it; without one, what there is to say."""
        url = self.url
        shown = escape(repr(self))
        return f'{shown}<br/>View run at: <a href="{escape(url)}" target="_blank">{escape(url)}</a>' if url else shown

    def __repr__(self) -> str:
        rank, world = self.topology.global_rank, self.topology.world_size
        return f"<dist_wandb.Session run_mode={self.plan.run_mode!r} rank {rank} of {world} run={self.plan.run_id!r}>"

    def _plan_with_base_id(self) -> RunPlan:
        if self.plan.base_id is None and self._job_store is not None:
            within = 0.0 if self._has_ended() else None  # who comes too late may find nothing any more
            base_id = self._job_store.wait_get(BASE_ID, f"rank {self.topology.main_rank}", within)
            self.plan = _plan(self.topology, self.options, base_id, self.plan.group)
        return self.plan


def open_session(
    options: Options,
    init_arguments: Mapping[str, Any],
    *,
    door: str,
    topology: Topology | None = None,
    step_metric: str | None = STEP_METRIC,
    number: int | None = None,
    proposed_id: str | None = None,
    adopt: Callable[[RunPlan], Run | None] | None = None,
    create_new: bool = True,
    announces: bool = True,
    catches_sigterm: bool = True,
    restarts: bool = True,
    as_given: bool = False,
) -> Session:
    """Find out who this rank is, decide, agree with the other ranks, and open the run.

    Args:
        options: The checked arguments of the door.
        init_arguments: Keyword arguments of `wandb.init`.
        door: Name of the door, for messages and to keep the doors' sessions apart.
        topology: Who this rank is, where a framework knows; found out otherwise.
        step_metric: Name of the x axis; `None` for none.
        number: Which of the door's sessions of this job it is, where the door can tell; counted otherwise.
        proposed_id: Base id to use unless the user asked for one, if this is the rank that leads the job.
        adopt: Asked, where the plan opens a run, for one that is open already and is to be used instead.
        create_new: Whether to make a run beside one that this process has; wandb.init would hand out that one.
        announces: Whether to say what was decided; otherwise `Session.announce` is the door's to call.
        catches_sigterm: Whether SIGTERM, if nobody handles it, ends the runs before it ends the process.
        restarts: Whether this start may continue the runs of an earlier one, and a later one those of this.
        as_given: Whether, in a world of one, wandb.init gets exactly `init_arguments`; otherwise settings that bound
            what a dead server or a killed process costs come with them.

    Returns:
        The session.

    Raises:
        ConfigurationError: Arguments that cannot be honoured.
        TopologyError: Not enough is known of this rank's place.
        RendezvousError: The ranks could not agree within `join_timeout`.
    """
    argument_checks.check_init_arguments(init_arguments, door)
    topology = topology or _detected_topology()
    name, job_store = _meet(options, topology, door, number)
    has_store = job_store is not None
    resuming.check_resume(init_arguments, options, topology, has_store=has_store)
    if job_store:
        topology = learn_layout(job_store, topology, needed=_needs_layout(options, topology))
    _check_sweep(options, topology, job_store)
    config_sync = ConfigSync(options, topology, job_arguments.chosen_config(init_arguments))
    config_sync.reach_by(lambda: job_store)
    config_sync.compare()
    restart_store = earlier = None
    if restarts and tells_job(topology):
        restart_store = RestartStore(resuming.session_name(door, number), options, topology, init_arguments)
        earlier = restart_store.find() if resuming.can_look_back(options, topology, has_store=has_store) else None
    init_arguments = resuming.continued(init_arguments, earlier, topology, has_store=has_store)
    wanted, id_name = requested.wanted_id(init_arguments), resuming.name_for_id(name, init_arguments)
    base_id = _base_id(options, topology, job_store, wanted=wanted, proposed=proposed_id, session_name=id_name)
    init_arguments = _share_job(options, topology, job_store, init_arguments)
    plan = _plan(topology, options, base_id, requested.wanted_group(init_arguments))
    unit = unit_of(topology, options.rank_scope)
    if job_store is not None:
        say_opened(job_store.below(keys_of(unit)), unit)
    adopted = adopt(plan) if adopt and plan.opens_run else None
    before = run_metadata.running_run()
    has_run = any(session.run for session in _live_sessions()) or (topology.world_size > 1 and before is not None)
    opening = Opening(
        options,
        topology,
        plan,
        job_store,
        init_arguments,
        complete=lambda arguments: config_sync.takeable(config_sync.completed(arguments, plan, unit.name)),
        create_new=create_new and has_run,
        is_alone=not has_run and before is None,
        as_given=as_given,
    )
    run = adopted or opening.run()
    attached = opening.attach()
    owns_run = adopted is None and run is not before
    if owns_run and step_metric is not None:
        axes.define_step_metric(run, step_metric)
    first_row = _first_row(plan, run, job_store, init_arguments) if step_metric == STEP_METRIC else 0
    session = Session(
        options,
        topology,
        plan,
        run,
        owns_run=owns_run,
        step_metric=step_metric,
        job_store=job_store,
        name=name,
        first_row=first_row,
        restart_store=restart_store,
        opening=opening,
        attached=attached,
        config_sync=config_sync,
        is_counted=number is None,
    )
    try:
        session.start()
        session.tell_of_run()
        if restart_store is not None and owns_run and run and not run_metadata.is_disabled(run):
            restart_store.leave(plan.base_id or str(run.id))
            if earlier is not None:
                resuming.announce(earlier, topology)
        if announces:
            session.announce()
        if catches_sigterm:
            _process_end.catch_sigterm()
    except BaseException:
        session.give_up()
        raise
    return session


def init(
    project: str | None = None,
    *,
    run_mode: RunMode | None = None,
    rank_scope: RankScope | None = None,
    reduce: Reduce = "auto",
    spread: Spread = False,
    per_rank: PerRank = "auto",
    limits: Limits | Mapping[str, float] = DEFAULT_LIMITS,
    config_sync: ConfigSyncMode = "warn",
    system_metrics: SystemMetrics = "primary",
    strict: bool = False,
    **wandb_init: Any,
) -> Session:
    """Open the W&B runs of a distributed job. Call it on every rank; it is a context manager too.

    Args:
        project: Name of the W&B project.
        run_mode: `"auto"`: one run for the unit, opened by its first rank. `"shared"`: one run that all ranks of the
            unit write into. `"new"`: one run per rank, grouped. `None`: what the decorator `wandb_init` around was
            given, else what the variable `DIST_WANDB_RUN_MODE` says, else `"auto"`.
        rank_scope: `"global"`: all ranks are one unit. `"worker"`: the ranks of each node are. `None`: likewise, with
            `DIST_WANDB_RANK_SCOPE`; else `"global"`.
        reduce: How one number comes from the ranks' numbers: `"mean"`, `"sum"`, `"min"`, `"max"`, `"first"`, a mapping
            of name patterns to those, of which the first that matches counts, or `None` for no reduction: then the
            primary writes its own numbers. `"auto"` is `"mean"`, but `None` with ``run_mode="new"``.
        spread: Also write the spread over ranks (``NAME/min``, ``NAME/max``, ``NAME/std``, ``NAME/argmax_rank``), of
            all names or of those that match the patterns. The standard deviation is weighted as the mean m is:
            sqrt(sum(w * (x - m)**2) / sum(w)).
        per_rank: In a shared run, which names each rank also writes under its label (``rank-3/loss``, and media of
            ranks other than the primary), with or without a reduction: `"auto"` for all but numbers that are equal on
            all ranks by nature, `True` for all, `False` for none, or patterns. Equal by nature are counters and
            schedules: `epoch`, `iter`, `iteration`, `step`, `global_step`, `tokens`, `lr`, `lr-*` and `learning_rate`,
            also behind a slash (`trainer/global_step`).
        limits: How long, and how much, is waited: `dist_wandb.Limits`, or a mapping of its arguments; as in
            `dist_wandb.init`. Times are in seconds.
        config_sync: What to do about ranks that pass different values for a name in `config`: `"warn"` once, raise an
            error on all ranks (`"check"`, which waits for them up to `join_timeout`), or nothing (`"off"`). In any case
            the primary's values hold; with ``run_mode="new"``, where each rank keeps its own, only `"check"` objects.
            Names such as ``local_rank``, ``gpu`` and ``device`` are not compared, as they differ by nature.
        system_metrics: With ``run_mode="auto"``: record the hardware of the primary's node (`"primary"`) or of all
            nodes (`"all-nodes"`).
        strict: Whether a run that W&B cannot open is an error. Otherwise it is written to disk, with a warning.
        **wandb_init: Further arguments of `wandb.init`. An `id` or `group` replaces the generated one in the ids and
            groups of all runs of the job. With ``resume="auto"`` the runs of the last start in this directory are
            continued, unless it ended well; with ``"never"`` not even those of a job that its launcher restarts.
            Without `reinit`, a run that is open already is finished before, if this call (in a loop, say) has opened
            it, or in a notebook; but not in a ``with`` block or a decorated function, where runs are nested.

    Returns:
        The session of this rank, with `log`, `flush`, `finish`, `run`, `plan`, `topology`, `id`, `url` and `config`.

    Raises:
        ConfigurationError: An argument that cannot be honoured, or ``config_sync="check"`` and different configs.
        TopologyError: This process's rank is unknown, or the launcher's variables contradict each other.
        RendezvousError: The ranks could not agree on a run id within `join_timeout`.

    Note:
        With ``run_mode="shared"``, a `WANDB_SERVICE` that this process inherited from another is removed from its
        environment: one wandb process refuses two writers of one run.

        While a session is open, SIGTERM ends its run with exit code 143 before it ends the process, unless the process
        handles that signal itself. Calls of `log`, `define_metric` and `finish` of the run, also by ``wandb.log`` and
        its like, come to the session first (see `log`). At the end all is as it was. Nothing else is changed.

        The x axis of all metrics is `global_step`, unless `define_metric` of the run says otherwise.

        While the job runs, rank 0 keeps a note of a few hundred bytes in ``DIR/wandb/dist-wandb-resume``. A restart by
        torchrun or SLURM continues the same runs by it, and rows without a step go on behind those that are there.

    Example:
        Two processes under torchrun::

            with dist_wandb.init(project="digits", run_mode="auto") as run:
                run.log({"loss": 0.4}, step=1)  # on rank 0
                run.log({"loss": 0.6}, step=1)  # on rank 1, which has no run; rank 0 writes one row, loss=0.5
    """
    options = Options.among(locals())
    arguments = {**_wandb_arguments(around()), **wandb_init}
    if project is not None:
        arguments["project"] = project
    place = here()
    if not (is_nested_on_purpose() or requested.sets_reinit(arguments)):
        _finish_earlier(place)
    session = open_session(options, arguments, door="dist_wandb.init")
    session.opened_at(place)
    return session


def _finish_earlier(place: Place) -> None:
    """Finish what a loop, or a notebook's cell, has opened and is about to open again; as wandb does in notebooks."""
    in_notebook = is_notebook()
    for session in reversed(_live_sessions().copy()):
        if session.may_end_before(place, in_notebook=in_notebook):
            session.finish()


def check_init(given: Mapping[str, Any]) -> None:
    """Check arguments of `init` without opening anything.

    Args:
        given: Arguments by name.

    Raises:
        ConfigurationError: An argument that cannot be honoured.
    """
    Options.among(given)
    argument_checks.check_init_arguments(
        {name: value for name, value in given.items() if name not in OPTION_NAMES}, "wandb_init"
    )


def _wandb_arguments(around: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of the decorator around, those that further runs share: all of W&B's that name no one run."""
    return {name: value for name, value in around.items() if name not in OPTION_NAMES and name not in _OF_ONE_RUN}


def get_run() -> Session | NullRun:
    """The session that was opened last in this process and is not finished; a `NullRun` if there is none.

    Inside a function that `wandb_init` decorates, it is the last one of that call: calls that run at the same time, in
    threads or in tasks of asyncio, each have their own.

    Returns:
        What `init` returned, so that ``get_run().log(...)`` counts on every rank. It is truthy on all ranks of a job,
        also on those that open no run; the `NullRun` is falsy.
    """
    live, inside = _live_sessions(), entered()
    mine = [session for session in live if inside in (session, session.opened_inside)]
    return next(reversed(mine if inside is not None else mine or live), None) or _NoSession()


class _NoSession(NullRun):
    """What there is where no session is open."""

    def log(self, *_args: Any, **_kwargs: Any) -> None:
        """Log nothing; said once if nobody has ever opened a session here, on the rank that would tell the job."""
        if not _first_session.has_begun and not _first_session.is_missed and _is_leading():
            _first_session.is_missed = True
            _log.warning(
                "dist_wandb: dist_wandb.get_run().log was called, but no session was opened in this process, so "
                "nothing is logged. Call dist_wandb.init() before, on every rank, or decorate the function with "
                "dist_wandb.wandb_init."
            )


class _First:
    """Of the first session of this process.

    Attributes:
        has_begun: Whether there was one.
        is_missed: Whether a script that logs without one was told.
    """

    has_begun = False
    is_missed = False


_first_session = _First()


def _is_leading() -> bool:
    try:
        return tells_job(Topology.detect())
    except DistWandbError:  # its error is for who opens a session
        return True


entered: Current[Session | None] = Current("entered", None)
"""The session of the decorated function around the code that runs."""
is_nested_on_purpose = Current("is_nested_on_purpose", default=False)
"""Whether `init` is called for a decorated function, which ends what it opens."""

_FOR_USERS = ("config", "finish", "flush", "group_url", "id", "log", "plan", "run", "topology", "url")
_OF_ONE_RUN = ("id", "name", "notes", "config", "resume", "resume_from", "fork_from")
_sessions: list[Session] = []


def _end_with_process(exit_code: int, failed: bool) -> None:
    """Finish what nobody has finished: the last session first, and the threads at last."""
    for session in reversed(_sessions.copy()):
        session.end_with_process(exit_code, failed=failed)
    end_all(failed=failed)


def _prepare_fork() -> None:
    for session in _sessions.copy():
        session.prepare_fork()


def _after_fork() -> None:
    wandb_private.disarm_exit_hooks()
    _process_end.let_sigterm_be()
    for session in _sessions:
        session.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_child=_after_fork)
_process_end = ProcessEnd(_end_with_process, wandb_private.code_of_exit)


def _let_sigterm_be() -> None:
    if not _sessions:
        _process_end.let_sigterm_be()


_opened: Counter[str] = Counter()


def holds(run: object) -> bool:
    """Whether `run` is the run of a session of this process that is not finished."""
    return any(session.run is run for session in _sessions)


def _live_sessions() -> list[Session]:
    """The sessions that are not finished; those whose run the user finished behind their back are forgotten."""
    for session in [session for session in _sessions if wandb_private.is_finished(session.run)]:
        session.retire()
    return _sessions


def _detected_topology() -> Topology:
    topology = Topology.detect()
    if topology.world_size == 1 and multiprocessing.parent_process() is not None:
        warnings.warn(
            f"{multiprocessing.current_process().name} was started by another process, but nothing tells its rank, so "
            "it is taken for a job of its own. If it is one of several ranks, open the run after init_process_group, "
            "or set RANK and WORLD_SIZE.",
            stacklevel=4,
        )
    elif topology.origin("global_rank") != "torch.distributed":
        for doubt in doubts_of(detected_launchers(), topology):
            warnings.warn(doubt, stacklevel=4)
    return topology


def _plan(topology: Topology, options: Options, base_id: str | None, group: str | None) -> RunPlan:
    return plan_run(topology, options.run_mode, options.rank_scope, base_id, group=group, all_nodes=options.all_nodes)


def _needs_layout(options: Options, topology: Topology) -> bool:
    return needs_layout(topology, options.run_mode, options.rank_scope, all_nodes=options.all_nodes)


def _needs_base_id(options: Options, topology: Topology) -> bool:
    return needs_base_id(topology, options.run_mode, options.rank_scope, all_nodes=options.all_nodes)


def _meet(options: Options, topology: Topology, door: str, number: int | None) -> tuple[str, JobStore | None]:
    """The session's name, equal on all ranks, and the job's store. A world of one meets nobody and is not counted."""
    if topology.world_size == 1:
        return door, None
    if number is None:
        _opened[door] += 1
        number = _opened[door]
    name = f"{door}/{number}"
    job_store = JobStore.find(name, topology, options.limits.join_timeout)
    if job_store is not None:
        leftovers.clear_away(job_store, topology.world_size)
    return name, job_store


def _base_id(
    options: Options,
    topology: Topology,
    job_store: JobStore | None,
    *,
    wanted: str | None,
    proposed: str | None,
    session_name: str,
) -> str | None:
    """The base id as far as this rank's plan needs it; the leading rank also says it for ranks that do."""
    if topology.world_size == 1:
        return wanted
    if not _needs_base_id(options, topology):
        return wanted or (None if job_store else id_of_job(session_name, topology))
    if job_store is None and options.run_mode == "auto" and options.rank_scope == "global":
        return wanted or id_of_job(session_name, topology) or proposed or make_id()  # no other rank's plan names it
    return agree_on_base_id(job_store, topology, wanted, proposed, session_name)


def _check_sweep(options: Options, topology: Topology, job_store: JobStore | None) -> None:
    try:
        argument_checks.check_sweep(options.run_mode, options.rank_scope, topology)
    except ConfigurationError as error:
        refuse(job_store, topology, str(error))  # other ranks may not have the sweep's variables
        raise


def _share_job(
    options: Options,
    topology: Topology,
    job_store: JobStore | None,
    init_arguments: Mapping[str, Any],
) -> Mapping[str, Any]:
    """The leading rank tells what describes the job; the others complete their arguments with what is told yet."""
    if job_store is None:
        return init_arguments
    if tells_job(topology):
        _tell_job(options, job_store, init_arguments)
        return init_arguments
    if not _needs_base_id(options, topology):
        return init_arguments
    job = job_store.wait_get(_JOB, f"rank {topology.main_rank}")
    _check_same_job(options, topology, job["options"])
    own = {name: value for name, value in init_arguments.items() if value is not None}
    told: dict[str, Any] = job_arguments.with_own_secrets(job["arguments"], init_arguments)
    if options.run_mode == "shared" or (options.run_mode == "auto" and options.all_nodes):
        # every writer sends what describes the run, and W&B keeps what came last
        places: dict[str, Any] = {name: own[name] for name in ("dir", "mode") if name in own}
        own.pop("config", None)
        return {**own, **told, **places}
    return {**told, **own}


def _told_options(options: Options) -> dict[str, str]:
    """The options that must be the same on all ranks."""
    return {"run_mode": options.run_mode, "rank_scope": options.rank_scope}


def _tell_job(options: Options, job_store: JobStore, init_arguments: Mapping[str, Any]) -> None:
    told = {
        "options": _told_options(options),
        "all": asdict(options),
        "arguments": job_arguments.arguments_for_others(init_arguments),
    }
    job_store.publish(_JOB, told)


def _check_same_job(options: Options, topology: Topology, told: Mapping[str, str]) -> None:
    mine = _told_options(options)
    if mine != told:
        raise ConfigurationError(
            f"Rank {topology.global_rank} opens its run with {mine}, but rank {topology.main_rank} with {dict(told)}. "
            "Give all ranks the same mode and scope, and open the same runs in the same order on all of them."
        )


def _first_row(plan: RunPlan, run: AnyRun, job_store: JobStore | None, init_arguments: Mapping[str, Any]) -> int:
    """Where rows without a step begin; one place for all writers of a shared run, which its primary finds out."""
    if not plan.shared or plan.primary or job_store is None:
        return next_row(run, STEP_METRIC, init_arguments)
    if not requested.continues(init_arguments):
        return 0
    try:
        return int(job_store.wait_get(run_key(plan), "its primary").get("first_row", 0))
    except RendezvousError as error:
        _log.warning("dist_wandb: rows without a step begin at 0 under this rank's label: %s", error)
        return 0


def told_job(door: str, topology: Topology, timeout: float) -> dict[str, Any] | None:
    """What the leading rank told of the next session of `door` that this rank has not opened yet. Never waits for it.

    Args:
        door: Name of the door.
        topology: Who this rank is.
        timeout: How long the job's store may take to answer, in seconds.

    Returns:
        The options under ``"all"``; `None` if that rank has not opened the session, or there is no store. Sessions
        that it has finished already are passed over: this rank had no part in them.
    """
    while True:
        number = _opened[door] + 1
        job_store = JobStore.find(f"{door}/{number}", topology, timeout)
        if job_store is None:
            return None
        if not leftovers.is_over(job_store):
            return job_store.try_get(_JOB)
        _opened[door] = max(_opened[door], number)  # another thread may ask as well
