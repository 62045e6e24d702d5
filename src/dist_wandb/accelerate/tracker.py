"""The door for Hugging Face Accelerate: `DistWandbTracker`, in place of ``log_with="wandb"``.

Accelerate calls its trackers on the main process only. So that the other ranks take part, the tracker wraps four
methods of `Accelerator`, once, at class level; for accelerators without a `DistWandbTracker` in `log_with` they do what
they did. `DistWandbTracker.attach` does without the wrapping.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import (
    ConfigurationError,
    MissingExtraError,
    RendezvousError,
    TopologyError,
    UnsupportedVersionError,
)

try:
    import accelerate
    from accelerate import Accelerator, PartialState
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import DistributedType
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"DistWandbTracker needs Accelerate, but {error.name!r} is missing. Run: pip install 'dist-wandb[accelerate]'"
    ) from error

from dist_wandb.accelerate.names import NAME, STOCK_NAME, StandInName, register, stands_in
from dist_wandb.config.sync import ConfigView
from dist_wandb.payloads.devices import copied_tensor
from dist_wandb.payloads.media.gathers import gathered, gathered_table
from dist_wandb.payloads.torchmetrics.metrics import is_metric
from dist_wandb.runs import argument_checks, interception, wandb_media
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.job_description import told_job
from dist_wandb.session.opener import open_session
from dist_wandb.session.session import Session
from dist_wandb.settings.config_values import given_values
from dist_wandb.settings.limits import DEFAULT_LIMITS, Limits
from dist_wandb.settings.options import ConfigSyncMode, Options, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import PerRank, Reduce, Spread
from dist_wandb.store.timed_caller import Inquiry
from dist_wandb.topology.model import Leader, Topology
from dist_wandb.user_lines import users_line, warn

if TYPE_CHECKING:
    from dist_wandb.runs.null_run import AnyRun

_DOOR = "DistWandbTracker"
_PAUSE = 0.05  # seconds between two looks whether the main process has begun
_GLANCE = 1.0  # seconds that the job's store gets for this where the answer is wanted at once
_MOST_EARLY_ROWS = 1000  # kept on a rank that waits for the main process to call init_trackers


class DistWandbTracker(GeneralTracker):  # type: ignore[misc]  # Accelerate ships no types
    """Weights & Biases tracker for Accelerate that reaches all ranks.

    Give an instance to `log_with`, or the name ``"dist_wandb"`` once `dist_wandb.accelerate` is imported. Then use
    `Accelerator.init_trackers`, `log`, `get_tracker` and `end_training` as ever, on all ranks, guarded or not.

    Args:
        project: Name of the W&B project. Wins over the one given to `init_trackers`.
        run_name: What Accelerate's own tracker calls the project; the same as `project`.
        run_mode: Which ranks open a run: `"auto"`, `"shared"` or `"new"`; `None` and the rest as in `dist_wandb.init`.
        rank_scope: `"global"` or `"worker"`; as in `dist_wandb.init`.
        reduce: How one number comes from the ranks' numbers; as in `dist_wandb.init`.
        spread: Of which names the spread over ranks is written too; as in `dist_wandb.init`.
        per_rank: Which names each rank of a shared run also writes under its label; as in `dist_wandb.init`.
        limits: How long, and how much, is waited: `dist_wandb.Limits`, or a mapping of its arguments; as in
            `dist_wandb.init`. Times are in seconds.
        config_sync: What to do about ranks that pass different configs; as in `dist_wandb.init`.
        system_metrics: Whose hardware metrics are recorded; as in `dist_wandb.init`.
        strict: Whether a run that cannot be opened is an error; as in `dist_wandb.init`.
        wrap: Whether to wrap the methods of `Accelerator` that otherwise act on the main process only. Without it,
            call `DistWandbTracker.attach(accelerator)` on every rank.
        **init_kwargs: Further arguments of `wandb.init`. They win over those given to `init_trackers`.

    Raises:
        ConfigurationError: An argument that cannot be honoured; the nearest argument of `wandb.init` is named.
        UnsupportedVersionError: `Accelerator` is not as any version that is known; `attach` works all the same.

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
        wrap: bool = True,
        **init_kwargs: Any,
    ) -> None:
        super().__init__()
        self._options = Options.among(locals())
        project = _one_project(project, run_name)
        self._own_arguments = init_kwargs if project is None else {"project": project, **init_kwargs}
        self._given_arguments: dict[str, Any] = {}  # those given to init_trackers
        argument_checks.check_init_arguments(self._own_arguments, _DOOR)
        self._session: Session | None = None
        self._last_run: AnyRun | None = None  # of the session that is finished
        self._inquiry = Inquiry(self._told_job, _PAUSE)
        self._stand_in: NullRun | None = None  # until this rank starts, where it may join late
        self._early_rows: deque[tuple[Mapping[str, Any], int | None, dict[str, Any]]] = deque(maxlen=_MOST_EARLY_ROWS)
        self.wraps = wrap
        self.is_for_name = False  # whether it was made because `log_with` had its name
        self.asked: dict[str, Any] = {}  # of it by init_trackers
        if wrap:
            wrap_accelerator()

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
            accelerator: The accelerator. Its `log_with` may hold a `DistWandbTracker`; else one is made.
            project: Name of the W&B project, if a tracker is made.
            config: Written into the config of the run.
            **kwargs: Further arguments of `DistWandbTracker`, if a tracker is made.

        Returns:
            The started tracker of this rank.

        Raises:
            ConfigurationError: `accelerator` is no `Accelerator`, or arguments are given though `log_with` has a
                tracker that has its own.

        Example:
            Two ranks::

                accelerator = Accelerator()
                tracker = DistWandbTracker.attach(accelerator, "digits", run_mode="new")
                tracker.log({"loss": loss}, step=1)  # rank 0 into ID-rank-0, rank 1 into ID-rank-1
                accelerator.end_training()
        """
        if not isinstance(accelerator, Accelerator):
            raise ConfigurationError(
                f"attach was given {type(accelerator).__name__}, which is no accelerate.Accelerator. Pass the "
                "accelerator itself, as in DistWandbTracker.attach(accelerator)."
            )
        tracker = _instance_in(accelerator)
        if tracker is None:
            tracker = cls(project, wrap=False, **kwargs)
        elif kwargs or project is not None:
            raise ConfigurationError(
                f"attach was given {', '.join(['project'] * (project is not None) + list(kwargs))}, but the "
                "accelerator already has a DistWandbTracker. Give them to its constructor."
            )
        if tracker not in accelerator.trackers:
            accelerator.trackers.append(tracker)
        _name_as_scripts_do(tracker, accelerator)
        if config is not None:
            tracker.take_config(config)
        tracker.start()
        if config is not None:
            tracker.store_given_configuration(config)
        return tracker

    def start(self) -> None:
        """Open this rank's run, if it has one to open. Called by `init_trackers`; a second call does nothing."""
        if self._session is None:
            topology = _topology()
            if self._may_join_late():
                self._told_job()  # which passes over what went without this rank
            self._session = open_session(self._options, self._arguments, door=_DOOR, topology=topology)
            self._inquiry = Inquiry(self._told_job, _PAUSE)  # for the session after this one

    @property
    def run_name(self) -> str | None:
        """Name of the W&B project, by which Accelerate's own tracker knows it."""
        return self._arguments.get("project")

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """The arguments of `wandb.init`, but for the project."""
        return {name: value for name, value in self._arguments.items() if name != "project"}

    @property
    def run(self) -> AnyRun:
        """The same as `tracker`."""
        return self.tracker

    @property
    def tracker(self) -> AnyRun:
        """The W&B run of this rank. On a rank without one, something that accepts every use and does nothing.

        After `finish` it is the run that was finished, of which id, address and summary can be read.
        """
        if self._session is None and self._last_run is not None:
            return self._last_run
        if self._is_started_by_now(_GLANCE) or not self._may_join_late():
            return self.session.run
        if self._stand_in is None:
            self._stand_in = NullRun()
            self._stand_in.show_config(ConfigView(_UntilStarted(self)))
            interception.intercept_methods(self._stand_in, {"log": self._log_later})
        return self._stand_in

    @property
    def is_open(self) -> bool:
        """Whether this rank's part is started and not finished. Starts nothing."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session of this rank, with `log`, `flush`, `plan`, `id`, `url` and more.

        Raises:
            ConfigurationError: The tracker of this rank is not started, or finished already.
        """
        if not self._is_started() or self._session is None:
            raise ConfigurationError(
                f"The DistWandbTracker of rank {PartialState().process_index} is not started, or finished already. "
                "Call accelerator.init_trackers or DistWandbTracker.attach(accelerator) first, and end_training last."
            )
        return self._session

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Take what the run is to be started with as its config, unless the constructor was given one."""
        self._given_arguments = {"config": config, **self._given_arguments}

    def store_given_configuration(self, values: Mapping[str, Any]) -> None:
        """Write what all ranks were given into the config, on a rank whose own values hold."""
        if self.session.plan.primary:
            self.store_init_configuration(values)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write `values` into the config of this rank's run."""
        self.tracker.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log one row of this rank.

        Args:
            values: Values by name.
            step: Place of the row on the x axis (`global_step`); counted per call if `None`.
            **kwargs: `weight` and `commit`, as in `dist_wandb.Session.log`. Through `Accelerator.log` they go into
                ``log_kwargs={"dist_wandb": {"weight": batch_size}}``.
        """
        if self._is_started_by_now() or not self._may_join_late():
            self.session.log(values, step, **kwargs)
        else:
            if len(self._early_rows) == _MOST_EARLY_ROWS:
                self._warn_of_dropped_rows()
            self._early_rows.append((_copied(values), step, _copied(kwargs)))

    def _log_later(self, _log: Any, data: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.log(data, step, **kwargs)

    def log_images(
        self,
        values: Mapping[str, list[Any]],
        step: int | None = None,
        *,
        gather: bool = False,
        limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log lists of images (arrays or PIL images) by name.

        Args:
            values: Lists of images by name.
            step: Place of the row on the x axis (`global_step`).
            gather: Whether the images of all ranks become one panel, with the rank in their captions; call it on every
                rank. See `dist_wandb.gathered`.
            limit: How many images all ranks may give together under each name; only with `gather`.
            **kwargs: As in `log`.

        Example:
            Two ranks::

                tracker.log_images({"samples": [image]}, step=1, gather=True)
                # rank 0 writes one panel of two images, "rank 0" and "rank 1"
        """
        images = {
            name: gathered(held, limit=limit) if gather else wandb_media.images(held) for name, held in values.items()
        }
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
            table_name: Its name.
            columns: Names of the columns.
            data: Rows.
            dataframe: A data frame of pandas, in place of the two.
            step: Place of the row on the x axis (`global_step`).
            gather: Whether the rows of all ranks become one table, with a column ``rank``; call it on every rank. See
                `dist_wandb.gathered`.
            limit: How many rows all ranks may give together; only with `gather`.
            **kwargs: As in `log`.

        Example:
            Two ranks::

                tracker.log_table("predictions", ["label"], [[labels[rank]]], step=1, gather=True)
                # rank 0: labels "cat", "dog"; it writes one table, [[0, "cat"], [1, "dog"]] under rank, label
        """
        if gather:
            value: Any = gathered_table(columns, data, dataframe, limit=limit)
        else:
            value = wandb_media.table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: value}, step, **kwargs)

    def finish(self) -> None:
        """End this rank's part. Called by `end_training`; a second call does nothing."""
        if self._early_rows or self._last_run is None:  # the main process waits for ranks that logged nothing, too
            self._is_started()
        if self._early_rows:
            self._warn_of_dropped_rows()
            self._early_rows.clear()
        if self._session is not None:
            self._session.finish()
            self._last_run = self._session.run
            self._session = None

    def configure(self, project: str, init_kwargs: Mapping[str, Any]) -> None:
        """Take what was given to `init_trackers`, where the constructor was not given the same.

        Args:
            project: Name of the W&B project.
            init_kwargs: Arguments of `wandb.init`.

        Raises:
            ConfigurationError: An argument that `wandb.init` does not know.
        """
        if self.is_open:
            self._tell_of_vain({"project": project, **init_kwargs})
        else:
            argument_checks.check_init_arguments(init_kwargs, "init_trackers")
            self._given_arguments = self.asked = {"project": project, **init_kwargs}

    def _tell_of_vain(self, asked: Mapping[str, Any]) -> None:
        """Say what a further `init_trackers` cannot change of a run that is open."""
        new = [name for name in asked if name != "config" and _differs(asked[name], self.asked.get(name))]
        if new:
            warnings.warn(
                f"init_trackers was called again on rank {PartialState().process_index} with another "
                f"{', '.join(map(repr, new))}, but its run is open: it goes on as it is. Call tracker.finish() on all "
                "ranks before, for another run.",
                stacklevel=5,
            )

    def config_once_started(self) -> Mapping[str, Any]:
        """The config, on a rank that joins late: waits for the main process to begin, up to `join_timeout`."""
        deadline = time.monotonic() + self._options.limits.join_timeout
        while not self._is_started():
            if time.monotonic() >= deadline:
                warnings.warn(
                    f"The config was read on rank {PartialState().process_index}, but the main process did not call "
                    f"accelerator.init_trackers within {self._options.limits.join_timeout:g} s. So it is empty.",
                    stacklevel=5,
                )
                return {}
            time.sleep(_PAUSE)
        return given_values(self.session.config)

    def take_early_rows(self, other: DistWandbTracker) -> None:
        """Take over what waits in a tracker that this one replaces."""
        self._early_rows, other._early_rows = other._early_rows, self._early_rows

    def _warn_of_dropped_rows(self) -> None:
        number = f"{len(self._early_rows)} rows{' and more' if len(self._early_rows) == _MOST_EARLY_ROWS else ''}"
        message = (
            f"Rank {PartialState().process_index} logged {number}, but the main process has not called "
            "accelerator.init_trackers: they are dropped. Call it before the first log."
        )
        warn(message, users_line(), may_raise=False)  # neither the training nor its end fails over it

    @property
    def _arguments(self) -> dict[str, Any]:
        return {**self._given_arguments, **self._own_arguments}

    def _may_join_late(self) -> bool:
        """Whether this rank may log before it is started: published scripts call `init_trackers` on main alone."""
        return not PartialState().is_main_process

    def _is_started(self) -> bool:
        """Whether this rank is started; if it may join late, and the main process has begun, it is from now on."""
        if self._session is None and self._may_join_late():
            with contextlib.suppress(RendezvousError):  # the job is over, and its store gone: the training may go on
                self._join_as_told(self._told_job())
        return self._session is not None

    def _is_started_by_now(self, within: float = 0.0) -> bool:
        """The same, but a thread asks the store: the training waits no longer than `within`, in seconds."""
        if self._session is None and self._may_join_late():
            job = self._inquiry.look(within)
            try:
                self._join_as_told(job)
            except RendezvousError:
                self._inquiry.forget()
        return self._session is not None

    def _told_job(self) -> dict[str, Any] | None:
        """What the main process told of the session that comes next, if it has begun."""
        return told_job(_DOOR, _topology(), self._options.limits.join_timeout)

    def _join_as_told(self, job: Mapping[str, Any] | None) -> None:
        if job is not None:
            self._join_late(Options(**job["all"]))

    def _join_late(self, options: Options) -> None:
        """Start as the main process did, and log what had to wait for that."""
        self._options = options
        self.start()
        while self._early_rows:
            values, step, kwargs = self._early_rows.popleft()
            self.log(values, step, **kwargs)


class _UntilStarted:
    """Where a rank that joins late has the config from.

    Args:
        tracker: The tracker of this rank.
    """

    def __init__(self, tracker: DistWandbTracker) -> None:
        self._tracker = tracker
        self._written: dict[str, Any] = {}

    def read(self, name: str | None = None) -> Mapping[str, Any]:
        """Wait for the main process, and read what it has."""
        if name in self._written:
            return self._written
        return {**self._written, **self._tracker.config_once_started()}

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep values here."""
        self._written.update(values)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user may change before it is logged: mappings and tensors. A device is not waited for."""
    return {
        name: _copied(value) if isinstance(value, Mapping) and not is_metric(value) else copied_tensor(value)
        for name, value in values.items()
    }


def _one_project(project: str | None, run_name: str | None) -> str | None:
    if run_name is not None and project not in (None, run_name):
        raise ConfigurationError(
            f"DistWandbTracker was given project={project!r} and run_name={run_name!r}, which both name the W&B "
            "project. Give one of them; for the name of the run pass name=."
        )
    return run_name if project is None else project


def _differs(value: object, other: object) -> bool:
    return value is not other and repr(value) != repr(other)  # values of settings compare as they like


def _topology() -> Topology:
    state = PartialState()
    if state.num_processes == 1:
        _warn_of_separate_worlds()
    # Megatron-LM has losses on its last rank alone: Accelerate's main process is that one
    leader: Leader = "last" if state.distributed_type == DistributedType.MEGATRON_LM else "first"
    return Topology.from_framework(state.process_index, state.num_processes, "accelerate.PartialState", leader=leader)


def _warn_of_separate_worlds() -> None:
    """Accelerate makes every process a world of its own if it finds no accelerator and is not told to do without."""
    with contextlib.suppress(TopologyError):  # stale variables, which Accelerate does not look at either
        launched = Topology.from_environ()
        if launched is not None and launched.world_size > 1:
            warnings.warn(
                f"The launcher started {launched.world_size} processes ({launched.origin('world_size')}), but "
                "Accelerate runs each of them on its own: they train separately, and each opens a run. Without a GPU, "
                "pass Accelerator(cpu=True).",
                stacklevel=3,
            )


def _instance_in(accelerator: Accelerator) -> DistWandbTracker | None:
    held = (*accelerator.log_with, *accelerator.trackers)
    return next((tracker for tracker in held if isinstance(tracker, DistWandbTracker)), None)


def _tracker_off_main(accelerator: Accelerator) -> DistWandbTracker | None:
    """The tracker of a rank that Accelerate does not call; made here, if `log_with` has only its name."""
    if accelerator.is_main_process or not _has_ours(accelerator):
        return None
    tracker = _instance_in(accelerator) or _put_for_name(accelerator, DistWandbTracker())
    return tracker if tracker.wraps else None


def _put_for_name(accelerator: Accelerator, tracker: DistWandbTracker) -> DistWandbTracker:
    """Have a tracker take the place of its name in `log_with`, or of one that did so, with the rows that wait there."""
    tracker.is_for_name = True
    before = _instance_in(accelerator)
    if before is not None:
        tracker.take_early_rows(before)
        accelerator.trackers[:] = [held for held in accelerator.trackers if held is not before]
    accelerator.log_with = [tracker if held is before or _is_name(held) else held for held in accelerator.log_with]
    return tracker


def _is_name(held: object) -> bool:
    return isinstance(held, str) and held == NAME


def _has_ours(accelerator: Accelerator) -> bool:
    return NAME in accelerator.log_with or _instance_in(accelerator) is not None


def _to_start(accelerator: Accelerator, project: str, arguments: Mapping[str, Any]) -> DistWandbTracker:
    """The tracker that `init_trackers` is to start, with its arguments; for a name these are the constructor's."""
    tracker = _instance_in(accelerator)
    if tracker is None or (tracker.is_for_name and not tracker.is_open):
        tracker = _put_for_name(accelerator, DistWandbTracker(project, **arguments))
        tracker.asked = {"project": project, **arguments}
    else:
        tracker.configure(project, arguments)
    return tracker


def _name_as_scripts_do(tracker: DistWandbTracker, accelerator: Accelerator) -> None:
    """Let a tracker that stands in for Accelerate's own for wandb be found under that one's name."""
    if stands_in([tracker, *accelerator.log_with]):
        tracker.name = StandInName(NAME)


def _meant_for_us(accelerator: Accelerator, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments given by tracker name: those for ours, and those for wandb's where ours stands in for it."""
    stock = (kwargs or {}).get(STOCK_NAME, {}) if stands_in(accelerator.log_with) else {}
    return {**stock, **(kwargs or {}).get(NAME, {})}


def _init_trackers(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init_trackers(
        self: Accelerator, project_name: str, config: dict[str, Any] | None = None, init_kwargs: Any = None
    ) -> None:
        if not _has_ours(self):
            original(self, project_name, config, init_kwargs or {})  # before 1.14 it takes no None
            return
        ours = _meant_for_us(self, init_kwargs)
        if config is not None:
            ours = {"config": config, **ours}  # told to ranks that come later; store_init_configuration sets it again
        tracker = _to_start(self, project_name, ours)
        _name_as_scripts_do(tracker, self)
        if self.is_main_process:
            tracker.start()  # Accelerate before 1.8 leaves that to the constructor
        elif tracker.wraps:
            tracker.start()
            tracker.store_given_configuration(config or {})
        original(self, project_name, config, init_kwargs or {})
        others = [held for held in self.trackers if held is not tracker]
        if len(others) + 1 < len(self.trackers):  # started again, it is there twice, and would log all twice
            self.trackers[:] = [*others, tracker]

    return init_trackers


def _log(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def log(self: Accelerator, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        if not _has_ours(self):
            return original(self, values, step, log_kwargs or {})
        ours = _meant_for_us(self, log_kwargs)
        tracker = _tracker_off_main(self)
        if tracker is not None:
            tracker.log(values, step, **ours)
        return original(self, values, step, {**(log_kwargs or {}), NAME: ours})

    return log


def _get_tracker(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_tracker(self: Accelerator, name: str, unwrap: bool = False) -> Any:
        if name == STOCK_NAME and stands_in(self.log_with):
            name = NAME
        tracker = _tracker_off_main(self) if name == NAME else None
        if tracker is None:
            return original(self, name, unwrap)
        return tracker.tracker if unwrap else tracker

    return get_tracker


def _end_training(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def end_training(self: Accelerator) -> None:
        tracker = _tracker_off_main(self)
        if tracker is not None:
            tracker.finish()
        original(self)

    return end_training


# What is wrapped: the method, the parameters it is known to have, its wrapper.
_WRAPPED: tuple[tuple[str, tuple[str, ...], Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    ("init_trackers", ("self", "project_name", "config", "init_kwargs"), _init_trackers),
    ("log", ("self", "values", "step", "log_kwargs"), _log),
    ("get_tracker", ("self", "name", "unwrap"), _get_tracker),
    ("end_training", ("self",), _end_training),
)
_MARK = "__wrapped_by_dist_wandb__"


def wrap_accelerator() -> None:
    """Wrap the methods of `Accelerator` that act on the main process only, once in a process.

    Raises:
        UnsupportedVersionError: A method is missing, or its parameters are not those of any version that is known.
    """
    if getattr(Accelerator, _MARK, False):
        return
    for name, known, _ in _WRAPPED:
        found = _parameters(getattr(Accelerator, name, None))
        if found != known:
            raise UnsupportedVersionError(
                f"Accelerator.{name} of accelerate {accelerate.__version__} has the parameters {found}, but "
                f"DistWandbTracker knows it with {known}, and wraps it to reach all ranks. Pass wrap=False and call "
                "DistWandbTracker.attach(accelerator) on every rank instead."
            )
    for name, _, wrapper in _WRAPPED:
        setattr(Accelerator, name, wrapper(getattr(Accelerator, name)))
    setattr(Accelerator, _MARK, True)


def _parameters(method: Callable[..., Any] | None) -> tuple[str, ...]:
    """Names of a method's parameters; of the decorated function, where Accelerate's decorator does not show them."""
    if method is None:
        return ()
    decorated = inspect.getclosurevars(method).nonlocals.get("function", method)
    return tuple(inspect.signature(decorated).parameters)


def _register() -> None:
    """Make ``log_with="dist_wandb"`` work. There is no instance then whose constructor could wrap, so wrap here."""
    register(DistWandbTracker)
    with contextlib.suppress(UnsupportedVersionError):  # a constructor that needs it raises it
        wrap_accelerator()


_register()
