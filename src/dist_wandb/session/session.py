"""The object that every integration holds: one rank's part in the logging of a job, from `init` to `finish`.

`Session` delegates to its parts, each in a module of its own. `opener` assembles them; `registry` lists the sessions of
this process.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from dist_wandb.exchange.reports import report_lost
from dist_wandb.exchange.rows import Reductions, Rows
from dist_wandb.job.topology import Topology
from dist_wandb.notices import Line, Notices, named_line
from dist_wandb.payloads.scalars import Weight, commit_and_weight
from dist_wandb.runs import requested, run_metadata
from dist_wandb.runs.interception import AsRun
from dist_wandb.runs.null_run import AnyRun
from dist_wandb.session import registry
from dist_wandb.session.intake import Intake, make_exchange
from dist_wandb.session.notices import announcement, print_line, unused_names
from dist_wandb.session.own_run import OwnRun
from dist_wandb.session.relay import Relay
from dist_wandb.session.restart import RestartStore
from dist_wandb.session.sections import Section
from dist_wandb.session.shutdown import LEAST_TO_END, Shutdown
from dist_wandb.session.stalls import watcher
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan
from dist_wandb.wandb_files.stragglers import findings

if TYPE_CHECKING:
    from typing_extensions import Self


class Session(AsRun):
    """One rank's part in the W&B logging of a job. Created by `dist_wandb.init` and by the framework integrations.

    Attributes that the session does not define are looked up on its W&B run, so ``session.summary``,
    ``session.watch`` and so on work as on a `wandb.Run`. On a rank without a run they have no effect.
    ``session.name = "late"`` renames the run.

    Attributes:
        options: The checked arguments of the integration.
        topology: Rank and layout of this process.
        opened_inside: The session of the decorated function in which this session was opened, if any.
        opened_at: The line that called `init`; `None` if another integration opened the session.
        reductions: The reduction of each name that was logged; an integration sets the `defaults` of its names.
        is_current: Whether it may be ``wandb.run``: not if it was opened with ``reinit="create_new"``.
    """

    def __init__(self, own: OwnRun, restart_store: RestartStore | None) -> None:
        link = own.link
        self.options: Options = link.options
        self.topology: Topology = link.topology
        self.opened_inside: Session | None = registry.outer_session()
        self.opened_at: Line | None = None
        self.is_current: bool = own.opener.is_current
        self._link, self._own, self._config_sync = link, own, own.config_sync
        rows = own.rows()
        self.reductions: Reductions = rows.reductions
        enclosing = [session._link for session in registry.open_sessions()]  # noqa: SLF001  # of this class
        self._exchange = make_exchange(own, rows, self._refresh, enclosing)
        self._notices = Notices()
        self._intake = Intake(own, self._exchange, self._notices)
        self._relay = Relay(partial(self._intake.put, child=True), self.topology, self._metadata)
        self._shutdown: Shutdown = Shutdown(self._intake, self._relay, restart_store, partial(self._closed, rows))

    def _refresh(self, published: float) -> None:
        self._shutdown.refresh(published)  # made after the exchange, which calls this

    def _closed(self, rows: Rows, handed_over: bool) -> None:
        registry.remove(self)
        if handed_over and self._intake.rows:
            unused_names(self._link, rows.reductions)
            for finding in findings(rows.writing.timings, self._link.unit.size):
                print_line(f"dist_wandb: {finding}", self.run)

    def start(self, log: Callable[..., None]) -> None:
        """Start to take part: other threads use the session now. `log` gets what is logged directly to the run."""
        registry.add(self, self._shutdown)
        self._exchange.start()
        self._own.intercept(log, self._shutdown.finish_all_with_run, self._intake)
        directory = requested.wandb_directory(self._own.opener.arguments)
        watcher.begin(self.topology, self.options, lambda: self.run, directory)

    @property
    def plan(self) -> RunPlan:
        """What this rank does with W&B."""
        return self._link.plan

    @property
    def run(self) -> AnyRun:
        """The W&B run of this rank, or a `NullRun`. It changes if wandb's own process had to be replaced."""
        return self._own.run

    @property
    def step(self) -> int:
        """The step of the next row of this rank, as with wandb: after ``log(..., step=200)`` 200, as its row is open.

        Without steps, it is the number of rows that this rank has logged, after those of a run that is continued. On a
        framework's x axis it is the last step, at which a row without one lies.
        """
        return self._intake.step

    @property
    def starting_step(self) -> int:
        """The step of the first row of this start: 0, or after the last step of a run that is continued.

        On a rank without a run it is the primary's; the first read waits for it, up to `join_timeout`.
        """
        return run_metadata.starting_step(self.run)

    @property
    def owns_run(self) -> bool:
        """Whether `finish` may end the run: `False` for a run that was open before the session."""
        return self._own.is_owned

    @property
    def axis(self) -> str | None:
        """Name of the x axis; `None` for W&B's."""
        return self._own.step_metric

    @property
    def reduces(self) -> bool:
        """Whether numbers are reduced over several ranks. If not, each row comes from a single rank."""
        return self._link.reduces

    @property
    def id(self) -> str | None:
        """Id of the W&B run that this rank's numbers go to.

        On a rank without a run, this is the id that the primary published. If the primary has not opened its run yet,
        this waits; `None` after that. All reads together wait up to `join_timeout`.
        """
        if self._relay.is_fork:
            return self._relay.remote.id
        link = self._link
        known = str(self.run.id) if self.run else link.run_id()
        return self.id if link.has_moved else known  # it is now the session in which this one has continued

    @property
    def url(self) -> str | None:
        """URL of that run in W&B; `None` offline, and until the primary has published it."""
        if self._relay.is_fork:
            return self._relay.remote.url
        return run_metadata.url(self.run) if self.run else self._link.run_url()

    @property
    def group_url(self) -> str | None:
        """URL of the page of this run's group in W&B; `None` offline, and for a run without a group."""
        return run_metadata.group_url(self.run, self.plan.group)

    @property
    def config(self) -> Any:
        """The run's config. On a rank without a run, the config of its primary's run.

        Such a rank reads the same values, at most one heartbeat old. Its first read waits for the primary to open its
        run; after `join_timeout` it reads the values that this rank was given, or those of the rank that writes the run
        instead of the primary. Values written on such a rank do not reach the run: they are visible on this rank only,
        until the primary sets another value.

        Example:
            Two ranks, ``run_mode="auto"``, ``config={"lr": 0.1}``::

                session.config["lr"]  # rank 0: 0.1; rank 1, which has no run: 0.1
                if rank == 0:
                    session.config.update({"lr": 0.2}, allow_val_change=True)
                session.config.lr  # rank 0: 0.2; rank 1: 0.2 within a heartbeat
        """
        return self._relay.remote.config if self._relay.is_fork else self.run.config

    def expect_config(self, values: Mapping[str, Any]) -> None:
        """Warn once the run's config is known, if this rank has used other values before: training may differ."""
        self._config_sync.expect(values)

    @contextmanager
    def unchanged_config(self) -> Iterator[Any]:
        """The config, without updates from other ranks inside the block: for writing names that are missing from it."""
        with self._config_sync.undisturbed():
            yield self.config

    def log(
        self,
        data: Mapping[str, Any],
        step: int | None = None,
        *commit_or_weight: bool | Weight,
        commit: bool | None = None,
        weight: Weight = None,
    ) -> None:
        """Log one row. Never waits for other ranks or for a device.

        The numbers that the ranks of a unit log under one name at one step are reduced to one number by `reduce`. The
        result is written as soon as all of them have contributed. Without a step, the k-th numbers of a name on each
        rank belong together. Values that are not numbers (text, media, tables, lists, vectors) are not reduced: the
        primary's go into its row, and in a shared run those of the other ranks are written under their labels. Log
        tables and images of all ranks with `dist_wandb.gathered`.

        Args:
            data: Values by name: Python and numpy numbers, tensors with one element on any device, torchmetrics
                metrics and metric collections that are not computed yet, and whatever `wandb.Run.log` accepts.
            step: Position of the row on the x axis (`global_step`). If `None`, the row belongs to the last step that
                this rank gave or, if it has not given any, to the number of previous calls.
            *commit_or_weight: In third place, a bool is `commit`, as in wandb, and anything else is `weight`.
            commit: As in `wandb.Run.log`: `True` writes the row, `False` leaves it open for more values. Default:
                `True` without a step; with one, the row is open until a call has another step. If several ranks log,
                another value of a name that is in the open row, or of the user's x axis, begins a new row.
            weight: Weight of the values in a mean over ranks, such as the number of samples behind them: one number, or
                a mapping of names to numbers. Default: 1. A rank with weight 0 does not contribute.

        Raises:
            ConfigurationError: `data` is not a mapping, a name is not text, only a part of a `DTensor`'s elements is
                on this rank, the step is not an integer or is negative, or a weight is negative or not finite.

        Note:
            Calls of ``run.log`` and ``wandb.log``, also in libraries, come here, too, on every rank.

        Example:
            Two ranks, ``run_mode="shared"``::

                run.log({"loss": 0.4}, step=1, weight=3)  # rank 0: writes loss=0.45 and rank-0/loss=0.4
                run.log({"loss": 0.6}, step=1, weight=1)  # rank 1: writes rank-1/loss=0.6
        """
        commit, weight = commit_and_weight(commit_or_weight, commit, weight)
        if self._relay.is_fork:
            self._relay.remote.log(data, step, commit=commit, weight=weight)
        else:
            self._intake.put(data, step, weight, commit)

    def lead(self, step: int | None) -> None:
        """Let other sessions of this process with the same run continue at the step of a row, if it has one."""
        for other in registry.open_sessions() if self.run else ():
            if step is not None and other is not self and other.run is self.run:
                other._intake.follow(step)  # noqa: SLF001  # of this class

    def timed(self, name: str, *, waits: bool = False) -> Section:
        """Measure a section of the script, in a ``with`` block or as a decorator of a function.

        The next row includes the time of the sections that have ended since the last such row: ``time/NAME``, in
        seconds, as the mean over ranks and its spread (``/min``, ``/max``, ``/std``, ``/argmax_rank``). It also
        includes ``time/step``, the seconds since the last row with timings, and ``time/busy``, the share of them spent
        in sections that do not wait. If one rank delays the others, it includes ``time/straggler_rank`` and
        ``time/straggler_excess``: by how many seconds that rank was busy longer than the mean of the others.
        ``docs/timings.md`` has the rule. A section that ends with an exception also counts. A section inside another of
        the same name counts once. Nothing is measured in processes that a rank has started.

        Args:
            name: Name of the section, such as ``"data"``.
            waits: Whether it waits for other ranks, as a backward pass that reduces gradients: it is then not busy.

        Raises:
            ConfigurationError: The name is not text that W&B can store, or is reserved for a built-in timing.

        Example:
            Two ranks, of which rank 1 loads its data more slowly::

                with run.timed("data"):
                    batch = next(batches)  # rank 0: 0.1 s, rank 1: 0.3 s
                run.log({"loss": loss}, step=step)  # writes time/data 0.2, time/data/max 0.3, time/data/argmax_rank 1
        """
        return self._intake.sections.timed(name, self.topology.global_rank, waits=waits)

    def flush(self, timeout: float | None = None, *, together: bool = False, commit: bool = True) -> bool:
        """Wait until everything logged so far has been passed to W&B.

        Args:
            timeout: How long to wait, in seconds; `None` for `finish_timeout`.
            together: Whether all ranks call `flush` at this point of the script. It then returns when all have called
                it, and values that only other ranks logged are passed on as well.
            commit: Whether this ends a row that ``log(..., commit=False)`` left open; if not, it is not waited for.

        Returns:
            Whether everything that this rank logged has been passed on, including its part in rows of several ranks.
        """
        if self._relay.is_fork:
            return self._relay.remote.flush(timeout)
        self._config_sync.catch_up()
        return self._exchange.flush(timeout, together=together, commit=commit)

    def finish(self, exit_code: int | None = None, *, others_go_on: bool = False) -> None:
        """End this rank's part and, on a rank with a run, the run. Further calls have no effect.

        The primary of a shared run waits for its writers, up to `finish_timeout`; a rank that fails, for none. A run
        gets the exit code of the first rank of its unit that failed.

        Args:
            exit_code: Exit code of the job to show in W&B; `None` or 0 for success.
            others_go_on: Whether ranks without a run may never call `finish`: they leave 2 s after their last rows.

        Raises:
            TimeoutError: The upload took too long, and W&B's settings have ``finish_timeout_raises=True``.
        """
        self._shutdown.finish_with_run(exit_code, LEAST_TO_END) if others_go_on else self._shutdown.finish(exit_code)
        dropped, self._intake.dropped = self._intake.dropped, 0
        report_lost(self.topology.global_rank, {"that were logged after the run was finished": dropped})
        self._own.raise_asked_for()

    def fail(self, exit_code: int | None) -> None:
        """Set the exit code of the run, to be used if `finish` is not called with one; `None` or 0: it recovered."""
        self._shutdown.failure = exit_code or None

    def release(self) -> None:
        """Pass on what was logged and stop being the current session, but leave the run open: `Shutdown.hand_over`."""
        if not self._relay.is_fork:
            self._shutdown.hand_over(failed=False, within=self.options.limits.flush_timeout)
            self._own.restore()

    def is_ending(self) -> bool:
        """Whether the coordinator has begun to end this session, as far as the job's store answers."""
        return self._link.is_ending()

    def is_returned(self, line: Line | None, caller: str | None, *, disabled: bool) -> bool:
        """Whether the `caller`, at `line`, gets this session, which may be finished here: see `JobLink.agree`."""
        mine = not disabled and not (self.run and run_metadata.is_disabled(self.run))  # wandb makes such runs anew
        decision = not self._relay.is_fork and self._link.agree(line, mine, is_first=line == self.opened_at)
        if decision is None:
            self.finish()
        elif decision and caller is not None and self.plan.announces and self._notices.is_first(line):
            unless, end = ("", "finish()") if caller == "init" else (" but config", "tracker.finish() on all ranks")
            print_line(  # wandb prints it each time
                f"dist_wandb: {caller} was called at {named_line(line)} while the run {self.id} is open, and gets it; "
                f"arguments of this call{unless} have no effect. For another run, call {end} first, or pass "
                "reinit='finish_previous' or reinit='create_new'.",
                self.run,
            )
        return bool(decision)

    def announce(self, where: str | None = None) -> None:
        """Print one line, on a unit's primary, about what was decided and where the runs are (`None`: determine it)."""
        if self.plan.announces:
            plan = replace(self.plan, run_id=self.id)
            place = where or run_metadata.location(self.run, plan)
            print_line(announcement(self.topology, plan, place, self.group_url, self.options.unit_ranks), self.run)

    @property
    def has_store(self) -> bool:
        """Whether this rank has a store through which it reaches the others; always `True` in a world of one."""
        return self._link.store is not None or self.topology.world_size == 1

    def connect_late(self, init_arguments: Mapping[str, Any], integration: str, number: int) -> None:
        """Publish the job's description, for a session that was opened before there was a store."""
        self._link.connect_late(init_arguments, integration, number)
        self.report_run()

    def report_run(self) -> None:
        """Publish this rank's run to the other ranks, if there is a store."""
        self._own.report()

    def _metadata(self, waits: bool) -> dict[str, Any]:
        """The run's metadata for other processes; if not `waits`, only what is already known here."""
        if waits:
            return {"id": self.id, "url": self.url, "config": dict(given_values(self.config))}
        known = (self.id, self.url) if self.run else (self.plan.run_id, None)
        return {"id": known[0], "url": known[1], "config": self._config_sync.known()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a `RemoteSession`, which sends rows from another process, such as a spawned worker, to this one."""
        return self._relay.copied(waits=True).__reduce__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Finish, with the exit code for the exception if there is one. As with wandb, its log has the traceback."""
        if error is not None and registry.exit_code_of(error) and self.run:
            traceback.print_exception(error)
        self.finish(registry.exit_code_of(error))

    def _repr_html_(self) -> str:
        """The session for notebooks: the run's page, as wandb shows it; if there is none, the `repr`."""
        url, shown = self.url, escape(repr(self))
        return f'{shown}<br/>View run at: <a href="{escape(url)}" target="_blank">{escape(url)}</a>' if url else shown

    def __repr__(self) -> str:
        rank = f"{self.topology.global_rank} of {self.topology.world_size}"
        run_id = self.run.id if self.run else self.plan.run_id
        return f"<dist_wandb.Session run_mode={self.plan.run_mode!r} rank {rank} run={run_id!r}>"
