"""The integration for Hugging Face Accelerate: `DistWandbTracker`, in place of ``log_with="wandb"``.

Accelerate calls its trackers on the main process only. Four methods of `Accelerator` are wrapped so that the others
take part (`wrapping`); `attach` works without. If only the main process starts the tracker, they join later (`start`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, MissingExtraError, UnsupportedVersionError, as_usage_error

try:
    from accelerate import Accelerator, PartialState
    from accelerate.tracking import GeneralTracker, WandBTracker
except ModuleNotFoundError as _error:
    raise MissingExtraError(
        f"DistWandbTracker needs Accelerate, but {_error.name!r} is missing. Run: pip install 'dist-wandb[accelerate]'"
    ) from _error

from dist_wandb.accelerate.start import INTEGRATION, ConfigOnceStarted, LateJoin
from dist_wandb.accelerate.timings import REMEDY, TIMED, PreparedTimings
from dist_wandb.accelerate.wrapping import NAME, name_as_scripts_do, register, tracker_of, wrap_accelerator
from dist_wandb.job.units import UnitArgument
from dist_wandb.payloads.gathers import gathered, gathered_table
from dist_wandb.runs import interception, wandb_media
from dist_wandb.runs.null_run import AnyRun, NullRun, NullSummary
from dist_wandb.runs.requested import WandbArguments, check_init_arguments
from dist_wandb.session.api import while_open
from dist_wandb.session.config.targets import ConfigView
from dist_wandb.session.registry import current, repr_with
from dist_wandb.session.sections import check_timings
from dist_wandb.session.session import Session
from dist_wandb.session.stalls.verdict import Stall
from dist_wandb.settings.options import DEFAULT_LIMITS, ConfigSyncMode, Limits, Options, StallTimeout, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import PerRank, Reduce, Spread

if TYPE_CHECKING:
    from typing_extensions import Unpack

_SHORT_WAIT = 1.0  # seconds for the job's store to answer where the caller wants an answer at once


class DistWandbTracker(WandBTracker):  # type: ignore[misc]  # Accelerate ships no types
    """Weights & Biases tracker for Accelerate that reaches all ranks.

    Pass an instance to `log_with`, or the name ``"dist_wandb"`` once `dist_wandb.accelerate` is imported. Then use
    `Accelerator.init_trackers`, `log`, `get_tracker` and `end_training` as usual, on all ranks, guarded or not.

    Args:
        project: Name of the W&B project. Takes precedence over the project given to `init_trackers`.
        run_name: The same as `project`, under the name that Accelerate's own tracker uses.
        run_mode: Which ranks open a run: `"auto"`, `"shared"` or `"new"`. All options: see `dist_wandb.init`.
        rank_scope: Which ranks are one unit: `"global"` (all) or `"worker"` (those of a node).
        reduce: How the numbers of the ranks are reduced to one.
        spread: The names whose spread over ranks is written too.
        per_rank: The names that each rank of a shared run also writes under its label.
        limits: Time limits in seconds, and how many rows may wait: `dist_wandb.Limits`, or a mapping of its arguments.
        config_sync: What to do if ranks pass different configs: `"warn"`, `"check"` or `"off"`.
        system_metrics: Whose hardware metrics are recorded: `"primary"` or `"all-nodes"`.
        strict: Whether a run that cannot be opened is an error.
        unit: The ranks whose numbers belong together, if not all: a group, a mesh, a list of ranks, or the name of a
            dimension of the framework's mesh.
        primary_rank: Global rank of the primary; -1 for the last one.
        stall_timeout: Seconds without a sign of any rank until a message says where the ranks stand: `"auto"` for at
            least 300, `None` for never.
        on_stall: A function that is called with the same as data.
        timings: Whether to measure loading, forward pass, backward pass and update of each rank, and to name the rank
            that holds the others up. `Accelerator.prepare` and `backward` are wrapped for it, and the objects that
            `prepare` returns get hooks.
        wrap: Whether to wrap the methods of `Accelerator` that otherwise act on the main process only. Without it,
            call `DistWandbTracker.attach(accelerator)` on every rank.
        **init_kwargs: Further arguments of `wandb.init`. They take precedence over those given to `init_trackers`.

    Raises:
        ConfigurationError: An argument that cannot be honoured; the nearest argument of `wandb.init` is named.
        UnsupportedVersionError: `Accelerator` differs from all known versions; `attach` still works.

    Example:
        Two processes under ``accelerate launch`` or torchrun::

            accelerator = Accelerator(log_with=DistWandbTracker(run_mode="shared"))
            accelerator.init_trackers("digits", config={"lr": 0.1})
            accelerator.log({"loss": loss}, step=1)  # rank 0: loss and rank-0/loss; rank 1: rank-1/loss
            accelerator.end_training()
    """

    name: str = NAME
    requires_logging_directory = False
    main_process_only = False
    __repr__ = repr_with(lambda self: self.late_join.session)

    def __init__(
        self,
        project: str | None = None,
        *,
        run_name: str | None = None,
        run_mode: RunMode | None = None,
        rank_scope: RankScope | None = None,
        reduce: Reduce = "auto",
        spread: Spread = False,
        per_rank: PerRank = "auto",
        limits: Limits | Mapping[str, float] = DEFAULT_LIMITS,
        config_sync: ConfigSyncMode = "warn",
        system_metrics: SystemMetrics = "primary",
        strict: bool = False,
        unit: UnitArgument = None,
        primary_rank: int | None = None,
        stall_timeout: StallTimeout = "auto",
        on_stall: Callable[[Stall], object] | None = None,
        timings: bool = False,
        wrap: bool = True,
        **init_kwargs: Unpack[WandbArguments],
    ) -> None:
        GeneralTracker.__init__(self)  # the stock class's sets attributes that are properties here
        options = Options.among(locals())
        if run_name is not None and project not in (None, run_name):
            raise ConfigurationError(
                f"{INTEGRATION} was given project={project!r} and run_name={run_name!r}, which both name the W&B "
                "project. Give one of them; for the name of the run pass name=."
            )
        project = run_name if project is None else project
        arguments = {**({} if project is None else {"project": project}), **init_kwargs}
        check_init_arguments(arguments, INTEGRATION)
        self.late_join: LateJoin = LateJoin(options, arguments)
        self._last_run: AnyRun | None = None  # of the finished session
        self.ends_training = False  # whether `end_training` is called, as it should be on all ranks
        self.wraps = wrap
        self.is_for_name = False  # whether it was created because `log_with` had its name
        self.prepared: PreparedTimings | None = (
            PreparedTimings(lambda: self.late_join.session) if check_timings(timings) else None
        )
        if wrap:
            wrap_accelerator()
        if timings and not wrap:
            raise ConfigurationError(
                "timings=True measures what Accelerator.prepare returns, and has to wrap it, but wrap=False was given "
                "(or attach created the tracker). Pass log_with=DistWandbTracker(timings=True) to Accelerator, or "
                "measure with dist_wandb.get_run().timed."
            )
        if timings:
            wrap_accelerator(TIMED, REMEDY)

    @classmethod
    def attach(
        cls,
        accelerator: Accelerator,
        project: str | None = None,
        config: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> DistWandbTracker:
        """Start the tracker of an accelerator on this rank, without wrapping any method of `Accelerator`.

        Call it on every rank, after `init_trackers` if that is called at all, and log with the tracker it returns:
        `Accelerator.log` still reaches the main process only.

        Args:
            accelerator: The accelerator. If its `log_with` has no `DistWandbTracker`, one is created.
            project: Name of the W&B project, if a tracker is created.
            config: Values for the config of the run.
            **kwargs: Further arguments of `DistWandbTracker`, if a tracker is created.

        Returns:
            The started tracker of this rank.

        Raises:
            ConfigurationError: `accelerator` is not an `Accelerator`, or arguments are given although `log_with`
                already has a tracker.

        Example:
            Two ranks::

                accelerator = Accelerator()
                tracker = DistWandbTracker.attach(accelerator, "digits", run_mode="new")
                tracker.log({"loss": loss}, step=1)  # rank 0 into ID-rank-0, rank 1 into ID-rank-1
                accelerator.end_training()
        """
        if not isinstance(accelerator, Accelerator):
            raise ConfigurationError(
                f"attach was given {type(accelerator).__name__}, not an accelerate.Accelerator. Pass the "
                "accelerator itself, as in DistWandbTracker.attach(accelerator)."
            )
        tracker = tracker_of(accelerator)
        if tracker is None:
            tracker = cls(project, wrap=False, **kwargs)
        elif kwargs or project is not None:
            raise ConfigurationError(
                f"attach was given {', '.join(['project'] * (project is not None) + list(kwargs))}, but the "
                "accelerator already has a DistWandbTracker. Pass them to its constructor."
            )
        if tracker not in accelerator.trackers:
            accelerator.trackers.append(tracker)
        name_as_scripts_do(tracker, accelerator)
        if config is not None:
            tracker.late_join.set_config(config)
        tracker.start()
        if config is not None and tracker.session.plan.primary:
            tracker.store_init_configuration(config)
        return tracker

    def start(self) -> None:
        """Open this rank's run, if the rank opens one. Called by `init_trackers`; a second call does nothing.

        An open session, of the script or of another tracker, is used as `init` uses an open run.
        """
        own = self.late_join
        if own.session is not None and not self.is_open:
            own.session.finish()
            own.session = None
        if own.session is None and current() is not None:
            own.session = while_open(own.arguments, "init_trackers")
        if own.session is None:
            own.open()

    @property
    def run_name(self) -> str | None:
        """Name of the W&B project, under the name that Accelerate's own tracker uses."""
        return self.late_join.arguments.get("project")

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The arguments of `wandb.init` without the project."""
        return {name: value for name, value in self.late_join.arguments.items() if name != "project"}

    @property
    def run(self) -> AnyRun:
        """The same as `tracker`."""
        return self.tracker

    @property
    def tracker(self) -> AnyRun:
        """The W&B run of this rank; on a rank without a run, a stand-in that accepts every use and does nothing.

        After `finish` it is the finished run, whose id, address and summary can be read.
        """
        if self.late_join.session is None and self._last_run is not None:
            return self._last_run
        if self.late_join.find(_SHORT_WAIT) is not None or not self.late_join.is_possible:
            return self.session.run
        return self._stand_in

    @cached_property
    def _stand_in(self) -> NullRun:
        """The run until this rank is started, if it may join late."""
        log_later = lambda _, data, step=None, **arguments: self.log(data, step, **arguments)  # noqa: E731

        def run() -> AnyRun | None:
            has_ended = self.late_join.session is None and self._last_run is not None
            return self._last_run if has_ended else getattr(self.late_join.find(0.0), "run", None)

        def later(name: str, _: Any, *args: Any, **kwargs: Any) -> None:
            self.late_join.act(lambda run: getattr(run, name)(*args, **kwargs))

        stand_in, summary = NullRun(), NullSummary()
        summary.note_by(lambda name, value: self.late_join.act(lambda run: run.summary.update({name: value})))
        for name in ("alert", "define_metric"):
            interception.intercept(stand_in, name, partial(later, name))
        stand_in.show(config=ConfigView(ConfigOnceStarted(self.late_join)), _summary=summary, _successor=run)
        for owner in (stand_in, sys.modules.get("wandb")):
            if hasattr(owner, "log"):
                interception.intercept(owner, "log", log_later)
        return stand_in

    @property
    def is_open(self) -> bool:
        """Whether this rank is started, and neither it nor the main process ends the session. Starts nothing."""
        session = self.late_join.session
        return session is not None and not (self.late_join.is_possible and session.is_ending())

    @property
    def session(self) -> Session:
        """The session of this rank, with `log`, `flush`, `plan`, `id`, `url` and more.

        If `init_trackers` is called on the main process only, other ranks wait for that here, up to `join_timeout`.

        Raises:
            ConfigurationError: The tracker of this rank is not started, or finished already.
        """
        may_wait = self.late_join.is_possible and self._last_run is None
        session = self.late_join.wait(self.late_join.options.limits.join_timeout if may_wait else 0.0)
        if session is None:
            error = ConfigurationError(
                f"The DistWandbTracker of rank {PartialState().process_index} is not started, or finished already. "
                "Call accelerator.init_trackers or DistWandbTracker.attach(accelerator) first, and end_training last."
            )
            raise as_usage_error(error)
        return session

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write `values` into the config of this rank's run."""
        self.tracker.config.update(values, allow_val_change=True)  # also what is no mapping, such as a Namespace

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row of this rank.

        Args:
            values: Values by name.
            step: Position of the row on the x axis (`global_step`); counted per call if `None`.
            **kwargs: `weight` and `commit`, as in `dist_wandb.Session.log`. In `Accelerator.log` pass them as
                ``log_kwargs={"dist_wandb": {"weight": batch_size}}``.
        """
        if self.late_join.is_possible:
            self.late_join.log(values, step, kwargs)
        else:
            self.session.log(values, step, **kwargs)

    def log_images(
        self,
        values: Mapping[str, list[Any]],
        step: int | None = None,
        *,
        gather: bool = False,
        limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log lists of images.

        Args:
            values: Lists of arrays or PIL images, by name.
            step: Position of the row on the x axis (`global_step`).
            gather: Whether the images of all ranks become one panel (`dist_wandb.gathered`); call it on every rank.
            limit: As in `dist_wandb.gathered`, for each name; only with `gather`.
            **kwargs: As in `log`.

        Example:
            Two ranks::

                tracker.log_images({"samples": [image]}, step=1, gather=True)
                # rank 0 writes one panel of two images, "rank 0" and "rank 1"
        """
        images = {
            name: gathered(held, limit=limit) if gather else list(map(wandb_media.image, held))
            for name, held in values.items()
        }
        if images:
            self.log(images, step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str | int] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        gather: bool = False,
        limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, from `columns` and `data` or from `dataframe`.

        Args:
            table_name: Name of the table.
            columns: Names of the columns.
            data: Rows.
            dataframe: A pandas data frame, instead of `columns` and `data`.
            step: Position of the row on the x axis (`global_step`).
            gather: Whether the rows of all ranks become one table (`dist_wandb.gathered`); call it on every rank.
            limit: As in `dist_wandb.gathered`; only with `gather`.
            **kwargs: As in `log`.

        Example:
            Two ranks::

                tracker.log_table("predictions", ["label"], [[labels[rank]]], step=1, gather=True)
                # rank 0: labels "cat", "dog"; it writes one table, [[0, "cat"], [1, "dog"]] under rank, label
        """
        if gather:
            self.log({table_name: gathered_table(columns, data, dataframe, limit=limit)}, step, **kwargs)
        else:
            super().log_table(table_name, columns, data, dataframe, step, **kwargs)

    def finish(self) -> None:
        """Finish the session of this rank; a second call does nothing. Called by `end_training` on all ranks.

        If only the main process calls it, it ends the run once the other ranks have logged their part of its rows. What
        they log later belongs to the next run that it opens.
        """
        if self.late_join.rows or self._last_run is None:  # the main process also waits for ranks that logged nothing
            self.late_join.find()
        self.late_join.drop_rows()
        if self.prepared is not None:
            self.prepared.timings.end()
        session = self.late_join.session
        if session is not None:
            session.finish(others_go_on=not self.ends_training)
            if session.run and not session.owns_run:  # of wandb's own `init`
                session.run.finish()
            self._last_run, self.late_join.session = session.run, None


# For log_with="dist_wandb". Wrapped here, because with a name no tracker is constructed beforehand.
register(DistWandbTracker)
with contextlib.suppress(UnsupportedVersionError):  # a constructor that needs the wrapping raises it again
    wrap_accelerator()
