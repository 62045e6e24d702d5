"""What every integration holds: one rank's part in the logging of a job, from `init` to `finish`.

`Session` only hands on. Its parts, each in a module of this name:

- `job_link`: messages of the ranks to each other through the job's store.
- `own_run`: this rank's W&B run, intercepted, replaced, ended.
- `intake`: what `log` does on the thread that trains.
- `shutdown` and `life_cycle`: how it ends, once.
- `children`: rows of processes that this rank has started.
- `notices`: messages to the user.

`opener` puts them together, and `registry` knows the sessions of this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from dist_wandb.exchange.rows import Rows
from dist_wandb.runs import run_metadata
from dist_wandb.session import registry
from dist_wandb.session.as_run import AsRun
from dist_wandb.session.children import Children
from dist_wandb.session.exit_codes import exit_code_of
from dist_wandb.session.intake import Intake, exchange_of
from dist_wandb.session.life_cycle import LifeCycle
from dist_wandb.session.notices import SessionNotices
from dist_wandb.session.shutdown import Shutdown
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.reduction import check_per_rank

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from dist_wandb.payloads.scalars import Weight
    from dist_wandb.restart.store import RestartStore
    from dist_wandb.run_config.sync import ConfigSync
    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.session.call_site import CallSite
    from dist_wandb.session.job_link import JobLink
    from dist_wandb.session.own_run import OwnRun
    from dist_wandb.session.sections import Section
    from dist_wandb.settings.options import Options
    from dist_wandb.settings.plan import RunPlan
    from dist_wandb.topology.model import Topology


class Session(AsRun):
    """One rank's part in the W&B logging of a job. Made by `dist_wandb.init`, and by the integrations for frameworks.

    What is not found on the session is looked up on its W&B run, so ``session.summary``, ``session.watch`` and the like
    work as on a `wandb.Run`; on a rank without a run they do nothing. ``session.name = "late"`` renames the run.

    Args:
        link: To the other ranks of the job.
        own: This rank's run.
        config_sync: This rank's part in having one config on all ranks.
        restart_store: Keeps the restart record, by which a later start finds the runs, on the coordinator.
        first_row: Position on the x axis of the first row without a step: behind those of a run that is continued.

    Attributes:
        options: The checked arguments of the integration.
        topology: Who this rank is.
        opened_inside: The session of the decorated function in which this one was opened, if any.
        opened_at: Where the script called `init`, if that opened it.
    """

    def __init__(
        self,
        link: JobLink,
        own: OwnRun,
        config_sync: ConfigSync,
        restart_store: RestartStore | None = None,
        *,
        first_row: int = 0,
    ) -> None:
        self.options: Options = link.options
        self.topology: Topology = link.topology
        self.opened_inside: Session | None = registry.entered()
        self.opened_at: CallSite | None = None
        self._is_block = False
        self._pid = os.getpid()
        self._link, self._own, self._config_sync = link, own, config_sync
        rows = Rows(
            own.writer(),
            self.options.reductions,
            check_per_rank(self.options.per_rank),
            counts=own.has_our_axis,
            first=first_row,
            rank=self.topology.global_rank,
            is_first=not link.unit.index,
        )
        self._exchange = exchange_of(link, own, rows, self._look, lambda: config_sync.news)
        life = LifeCycle()
        self._notices = SessionNotices(link)
        self._intake = Intake(link, own, self._exchange, life, self._notices, first_row=first_row)
        self._children = Children(self._intake.put_of_child, self.topology, self._metadata)
        parts = (life, link, own, config_sync, self._exchange, self._children, restart_store)
        self._shutdown = Shutdown(*parts, closed=lambda handed_over: self._closed(rows if handed_over else None))

    def _look(self, heard: float) -> None:
        """Now and then, on the thread of the exchange."""
        self._shutdown.look(heard)

    def _closed(self, handed_over: Rows | None) -> None:
        registry.remove(self)
        if handed_over is not None and self._intake.rows:
            self._notices.unused_patterns(handed_over.held.reductions.unused)

    def start(self) -> None:
        """Begin to take part: complete only now, as other threads look at the session from here on."""
        registry.add(self)
        self._exchange.start()
        self._own.intercept(self.log, self._shutdown.finish_with_run)

    @property
    def plan(self) -> RunPlan:
        """What this rank does with W&B."""
        return self._link.plan

    @property
    def run(self) -> AnyRun:
        """The W&B run of this rank, or a `NullRun`. Another one if wandb's own process had to be replaced."""
        return self._own.run

    @property
    def owns_run(self) -> bool:
        """Whether `finish` may end the run: not if it was there before."""
        return self._own.is_owned

    @property
    def brings_together(self) -> bool:
        """Whether the numbers of several ranks become one: if not, every rank's row is its own."""
        return self._link.reduces

    @property
    def id(self) -> str | None:
        """Id of the W&B run that this rank's numbers go to.

        On a rank that opens no run it is the id that its primary published. If the primary has not opened its run yet,
        this waits for it up to `join_timeout`; `None` if it never does.
        """
        if os.getpid() != self._pid:
            return self._children.remote().id
        return str(self.run.id) if self.run else self._link.run_id()

    @property
    def url(self) -> str | None:
        """Address of that run in W&B; `None` offline, and until the primary has published it."""
        if os.getpid() != self._pid:
            return self._children.remote().url
        return run_metadata.url(self.run) if self.run else self._link.run_url()

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
        return self.run.config if os.getpid() == self._pid else self._children.remote().config

    @contextmanager
    def unchanged_config(self) -> Iterator[Any]:
        """The config, into which nothing comes from other ranks meanwhile: to write what is not there."""
        with self._config_sync.look.undisturbed():
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
            step: Position of the row on the x axis (`global_step`). With `None` the row lies at the last step that this
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
            self._children.remote().log(metrics, step, weight, commit=commit)
        else:
            self._intake.put(metrics, step, weight, commit)

    def timed(self, name: str, *, waits: bool = False) -> Section:
        """Measure a section of the script: in a ``with`` block, or as a decorator of a function.

        The next row takes along how long the sections took that have ended since the last one: ``time/NAME``, in
        seconds, the mean over ranks and its spread (``/min``, ``/max``, ``/std``, ``/argmax_rank``). Beside it are
        ``time/step``, the seconds since the last row with timings, and ``time/busy``, the share of them in sections
        that do not wait; and where one rank holds the others up, ``time/straggler_rank`` and
        ``time/straggler_excess``, by how many seconds it was busy longer than the mean of the others. The rule is in
        ``docs/timings.md``. A section that ends by an exception counts as well; inside one of the same name it counts
        once. In a process that a rank has started, nothing is measured.

        Args:
            name: Of the section, such as ``"data"``.
            waits: Whether other ranks are waited for in it, as in a backward pass that reduces gradients: it does not
                count as busy.

        Raises:
            ConfigurationError: The name is not a text that W&B can store, or is of a timing that is written by itself.

        Example:
            Two ranks, of which rank 1 loads its data more slowly::

                with run.timed("data"):
                    batch = next(batches)  # rank 0: 0.1 s, rank 1: 0.3 s
                run.log({"loss": loss}, step=step)  # writes time/data 0.2, time/data/max 0.3, time/data/argmax_rank 1
        """
        return self._intake.sections.timed(name, self.topology.global_rank, waits=waits)

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
            return self._children.remote().flush(timeout)
        self._config_sync.catch_up()
        return self._exchange.flush(timeout, together=together)

    def finish(self, exit_code: int | None = None) -> None:
        """End this rank's part; on a rank with a run, end the run. May be called again, to no effect.

        The other writers of a shared run end before its primary, which waits for them up to `finish_timeout`. A run
        gets the exit code of the first rank of its unit that failed. A rank that fails waits for nobody.

        Args:
            exit_code: Exit code of the job as W&B is to show it; `None` or 0 for success.
        """
        self._shutdown.finish(exit_code)

    def fail(self, exit_code: int | None) -> None:
        """Set the exit code of the run for when nobody calls `finish` with one.

        Args:
            exit_code: Exit code of the job as W&B is to show it; `None` or 0 if a failure was overcome.
        """
        self._shutdown.failure = exit_code or None

    def release(self, *, failed: bool = False, within: float | None = None) -> None:
        """Hand over what was logged and stop being the current session, but leave the run open for others.

        Args:
            failed: Whether to wait for no other rank.
            within: How long to wait, in seconds; `None` for `finish_timeout`.
        """
        if os.getpid() == self._pid:  # not in a fork
            self._shutdown.hand_over(failed=failed, within=within)
            self._own.restore()

    def close_without_run(self) -> None:
        """Close after the user has finished this rank's run: nothing can be written any more."""
        self._shutdown.close_without_run()

    def end_with_process(self, exit_code: int, *, failed: bool) -> None:
        """Finish, as the process ends, with this code or in the middle of its work, and nobody has."""
        self._shutdown.end_with_process(exit_code, failed=failed)

    def catch_sigterm(self) -> None:
        """Let SIGTERM end the runs of this process before it ends the process, unless somebody else handles it."""
        registry.process_end.catch_sigterm()

    def may_end_before(self, call_site: CallSite, *, in_notebook: bool) -> bool:
        """Whether `init` at `call_site` is to finish this session: it opened it there before, and not as a block.

        Args:
            call_site: Where `init` is called.
            in_notebook: Whether the call site does not matter, because cells are changed and run again.
        """
        is_here = os.getpid() == self._pid and self.opened_inside is registry.entered()
        if not is_here or self._is_block or self.opened_at is None or not (in_notebook or call_site == self.opened_at):
            return False
        if not in_notebook:
            self._notices.opened_again(call_site.line, self.id)
        return True

    def announce(self, where: str | None = None) -> None:
        """Print in one line, on a unit's primary, what was decided and where the runs are.

        Args:
            where: Where this rank's run is; found out if `None`.
        """
        if self.plan.announces:
            self._notices.announce(self.run, self.id, where, self.group_url)

    @property
    def has_met(self) -> bool:
        """Whether this rank has a store through which it meets the others; a world of one meets nobody."""
        return self._link.store is not None or self.topology.world_size == 1

    def meet(self, init_arguments: Mapping[str, Any], integration: str, number: int) -> None:
        """Describe the job to the other ranks, if this session was opened before there was a store."""
        self._link.meet(init_arguments, integration, number)
        self.report_run()

    def report_run(self) -> None:
        """Publish this rank's run for the other ranks, if there is a store."""
        self._own.report(self._intake.first_row)

    def _metadata(self, waits: bool) -> dict[str, Any]:
        """The run's metadata for other processes; without waiting, as far as it is known."""
        if self.run or waits:
            return {"id": self.id, "url": self.url, "config": dict(given_values(self.config))}
        return {"id": self.plan.run_id, "url": None, "config": self._config_sync.known()}

    def prepare_fork(self) -> None:
        """Be ready to take what a fork of this process logs."""
        self._children.prepare_fork()

    def after_fork(self) -> None:
        """In the fork, hold nothing that only the process of the session is to hold."""
        self._children.after_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, such as a spawned worker, what hands over to this one what is logged there."""
        return self._children.reduced()

    def __enter__(self) -> Self:
        self._is_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish; with the exit code that the exception means, if there is one."""
        self.finish(exit_code_of(error))

    def _repr_html_(self) -> str:
        """For notebooks: the run's page, as wandb shows it; without one, its text."""
        url = self.url
        shown = escape(repr(self))
        return f'{shown}<br/>View run at: <a href="{escape(url)}" target="_blank">{escape(url)}</a>' if url else shown

    def __repr__(self) -> str:
        rank, world = self.topology.global_rank, self.topology.world_size
        return f"<dist_wandb.Session run_mode={self.plan.run_mode!r} rank {rank} of {world} run={self.plan.run_id!r}>"
