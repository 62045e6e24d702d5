"""The door for PyTorch Lightning: `DistWandbLogger`, in place of Lightning's own `WandbLogger`."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.context import get_spawning_popen  # undocumented, but what torch.multiprocessing relies on too
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dist_wandb.errors import ConfigurationError, MissingExtraError, TopologyError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import WandbLogger
    from lightning.pytorch.loggers.logger import DummyExperiment
    from lightning.pytorch.trainer.states import TrainerStatus
    from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
except ModuleNotFoundError as error:
    raise MissingExtraError(
        f"DistWandbLogger needs Lightning, but {error.name!r} is missing. Run: pip install 'dist-wandb[lightning]'"
    ) from error

from dist_wandb.lightning.advice import give_advice_only
from dist_wandb.lightning.checkpoints import base_id_in, write_base_ids
from dist_wandb.lightning.script_ids import ScriptIds
from dist_wandb.lightning.weights import epoch_weights
from dist_wandb.payloads.media.gathers import gathered, gathered_table
from dist_wandb.restart import resuming
from dist_wandb.restart.store import RestartStore
from dist_wandb.runs import argument_checks, axes, handover, requested, run_metadata
from dist_wandb.runs.null_run import NullPart, NullRun, NullSummary
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import holds
from dist_wandb.session.session import Session
from dist_wandb.settings.limits import DEFAULT_LIMITS, Limits
from dist_wandb.settings.options import ConfigSyncMode, Options, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode, RunPlan
from dist_wandb.settings.reduction import PerRank, Reduce, Spread
from dist_wandb.store.job_store import make_id
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dist_wandb.runs.null_run import AnyRun, Run

_Item = TypeVar("_Item")
_STEP_METRIC = "trainer/global_step"
_DOOR = "DistWandbLogger"
_script_ids = ScriptIds()


def _file_policy(policy: str) -> dict[str, Any]:
    """The argument `add_file_policy`, where the stock logger has it: Lightning 2.6 and newer."""
    if "add_file_policy" in inspect.signature(WandbLogger.__init__).parameters:
        return {"add_file_policy": policy}
    if policy != "mutable":
        raise ConfigurationError(
            f"add_file_policy={policy!r} was given to DistWandbLogger, but this version of Lightning does not know it. "
            "Leave it out, or install lightning>=2.6."
        )
    return {}


def _opened_too_early(run_id: str, run_mode: str, needs: str) -> ConfigurationError:
    return ConfigurationError(
        f"The run {run_id!r} was opened by logger.experiment before the Trainer started its processes, but "
        f"run_mode={run_mode!r} needs {needs}. Use logger.experiment from setup() on; pass config with "
        "log_hyperparams(), which waits for the run."
    )


# Methods of a run that give something back, which scripts go on with.
_GIVE_BACK = frozenset(
    {
        *("use_artifact", "log_artifact", "link_artifact", "upsert_artifact", "finish_artifact", "link_model"),
        *("use_model", "define_metric", "log_code", "save", "restore", "status", "display", "to_html"),
        *("get_url", "get_project_url", "get_sweep_url", "project_name"),  # of older versions
    }
)


def _needs_sync_dist(name: str) -> bool:
    """Whether Lightning's advice to log a name with `sync_dist=True` is of use.

    It is not where the name goes to our loggers alone, which bring the ranks' numbers together, and no callback or
    scheduler watches it: those look at what Lightning keeps, which is the rank's own.
    """
    trainers = [logger._trainer for logger in _with_trainer]  # noqa: SLF001  # of the same door
    running = [trainer for trainer in trainers if trainer and trainer.state.status == TrainerStatus.RUNNING]
    return not running or any(_watches(trainer, name) or not _speak_for_all(trainer) for trainer in running)


def _watches(trainer: Trainer, name: str) -> bool:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # public, but set elsewhere
    watched = [getattr(watching, "monitor", None) for watching in (*callbacks, *trainer.lr_scheduler_configs)]
    names = (name, f"{name}_epoch", f"{name}/dataloader_idx_")
    return any(isinstance(one, str) and (one == name or one.startswith(names[1:])) for one in watched)


def _speak_for_all(trainer: Trainer) -> bool:
    """Whether all numbers go to loggers that bring those of the ranks together, or are to have each rank's."""
    sessions = [logger._session if isinstance(logger, DistWandbLogger) else None for logger in trainer.loggers]  # noqa: SLF001
    return all(one and (one.plan.run_mode == "new" or one.options.reductions is not None) for one in sessions)


def _base_ids_of(trainer: Trainer) -> dict[str, str]:
    """Base ids of a Trainer's loggers of ours whose runs are open, by their numbers."""
    ours = [logger for logger in trainer.loggers if isinstance(logger, DistWandbLogger)]
    known = {str(logger._number): logger._base_id for logger in ours if logger._session is not None}  # noqa: SLF001
    return {number: base_id for number, base_id in known.items() if base_id is not None}


def _where_runs_are(stock_method: Callable[..., None]) -> Callable[..., None]:
    """A method of the stock logger for media, on all ranks that have a run: what it makes of them are files.

    The stock logger lets rank 0 alone do it. Its wrapper is taken off: the session decides where they go.
    """
    method = inspect.unwrap(stock_method)

    @functools.wraps(method)
    def log(self: DistWandbLogger, *args: Any, **kwargs: Any) -> None:
        session = self._open()
        if session is not None and session.plan.opens_run:
            method(self, *args, **kwargs)

    return log


class _NullExperiment(NullRun, DummyExperiment):
    """What `experiment` is on a rank without a run: Lightning asks for a `DummyExperiment` there.

    As Lightning's own, it answers calls of its methods with `None`, but for those with which a script goes on.

    Args:
        logger: Whose experiment it is. It may have no session yet.
    """

    def __init__(self, logger: DistWandbLogger) -> None:
        super().__init__()
        self.__dict__["logger"] = logger

    @property
    def config(self) -> Any:
        """The config of the run that this rank's numbers go to."""
        session = self._session
        return _Nothing() if session is None else session.config

    @property
    def summary(self) -> NullSummary:
        """What this rank has written into the summary."""
        session = self._session
        return session.run.summary if session is not None and isinstance(session.run, NullRun) else super().summary

    @summary.setter
    def summary(self, summary: object) -> None:
        """Accept and forget."""

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None, **_kwargs: Any) -> None:
        """Log a row of this rank, as the run's own `log` does where this rank has one."""
        session = self._session
        if session is not None:
            session.log(data, step, commit=commit)

    def finish(self, exit_code: int | None = None, **_kwargs: Any) -> None:
        """End this rank's part: W&B's own `finish` does, where this rank has a run."""
        session = self._session
        if session is not None:
            session.finish(exit_code)

    @property
    def _session(self) -> Session | None:
        logger: DistWandbLogger | None = self.__dict__.get("logger")
        return None if logger is None else logger._session  # noqa: SLF001  # of the same door

    def metadata(self) -> Mapping[str, Any]:
        """What is known of the run: before there is a session, what the logger knows before."""
        session, logger = self._session, self.__dict__.get("logger")
        if session is not None and isinstance(session.run, NullRun):
            return session.run.metadata()
        return super().metadata() if logger is None else {"id": logger.version, "name": None, "url": None}

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return _Nothing() if isinstance(found, NullPart) and name not in _GIVE_BACK else found

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "logger": None}


class _Nothing(NullPart):
    """A part of a stand-in for a run that answers calls with `None`."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> None:  # type: ignore[override]  # on purpose
        """Accept a call of anything."""


class DistWandbLogger(WandbLogger):
    """Weights & Biases logger for Lightning that knows about all ranks.

    Use it in place of `lightning.pytorch.loggers.WandbLogger`: it takes the same arguments in the same order, and at
    world size 1 it makes the same calls. Works in a `Trainer` and in Fabric (``Fabric(loggers=[DistWandbLogger()])``).

    Args:
        name: Display name of the run.
        save_dir: Directory below which W&B's directory lies.
        version: Run id; the same as `id`.
        offline: Whether to write the run to disk only.
        dir: As `save_dir`.
        id: Run id, from which the ids of all runs of the job are made.
        anonymous: As in the stock logger.
        project: Name of the W&B project.
        log_model: Whether to upload checkpoints as artifacts: `False`, `True` (at the end) or `"all"` (as they come).
        experiment: A W&B run to log into, instead of opening one. Only with ``run_mode="auto"``.
        prefix: Text put before every metric's name.
        checkpoint_name: Name of the checkpoint artifact.
        add_file_policy: `"mutable"` to copy checkpoints before the upload, else `"immutable"`.
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
        **kwargs: Further arguments of `wandb.init`; for `resume` see `dist_wandb.init`, and `id_in` for checkpoints.

    Raises:
        ConfigurationError: An argument that cannot be honoured.
        MisconfigurationException: `log_model` together with `offline`, as in the stock logger.

    Note:
        Until the Trainer has started its processes, nobody knows the ranks. With ``run_mode="auto"``, `experiment` may
        be used before, as with the stock logger. In the other modes pass `config=`, call `log_hyperparams` or `watch`
        (they are kept until the run is open), or use `experiment` from `setup` on.

        Lightning's ddp strategy starts the script again for each further rank. That all of them know one run id, this
        process keeps it in a small file in the directory for temporary files, as long as it lives. The environment
        stays as it is, but for what the stock logger does: ``offline=True`` sets `WANDB_MODE` to ``dryrun`` when the
        run is opened, so whatever this process opens afterwards is offline too.

    Example:
        Two ranks::

            trainer = Trainer(strategy="ddp", devices=2, logger=DistWandbLogger(project="digits", run_mode="new"))
            trainer.fit(model)  # rank 0: run ID-rank-0, rank 1: run ID-rank-1, both in the group ID
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,  # noqa: A002  # the stock logger's name
        id: str | None = None,  # noqa: A002  # the stock logger's name
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
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
        **kwargs: Any,
    ) -> None:
        self._options = Options.among(locals())
        super().__init__(
            name=name,
            save_dir=save_dir,
            version=version,
            offline=offline,
            dir=dir,
            id=id,
            anonymous=anonymous,
            project=project,
            log_model=log_model,
            experiment=experiment,
            prefix=prefix,
            checkpoint_name=checkpoint_name,
            **_file_policy(add_file_policy),
            **kwargs,
        )
        argument_checks.check_init_arguments(self._wandb_init, _DOOR)
        if experiment is not None and self._options.run_mode != "auto":
            raise ConfigurationError(
                f"experiment= hands DistWandbLogger one run, but run_mode={self._options.run_mode!r} needs a run of "
                "its own on every rank. Leave experiment out, or use run_mode='auto'."
            )
        self._session: Session | None = None
        self._module: weakref.ref[LightningModule] | None = None
        self._kept_calls: list[tuple[str, tuple[Any, ...]]] = []  # names, not functions: they are pickled for spawn
        self._parents_run: bytes | None = None
        self._place: str | None = None  # of the parent's run, which the child cannot tell
        self._is_announced = False
        self._runs_are_in_children = False
        self._home = os.getpid()
        self._number, self._base_id = _script_ids.take(self._id or make_id())
        self._look_back()

    @property
    def experiment(self) -> AnyRun:
        """The W&B run of this rank. On a rank without one, something that accepts every use and does nothing.

        Raises:
            ConfigurationError: It was used before the Trainer started its processes, and the run that was opened then
                is not the one that the run mode needs.
        """
        session = self._open()
        if session is None or not session.run:
            return _NullExperiment(self)
        return session.run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row of this rank; called by Lightning on every rank.

        Means that Lightning took over an epoch are weighted with the number of samples behind them on each rank, so
        that their mean over ranks is the mean over all samples: rank 0 with 1.0 of 2 samples and rank 1 with 3.0 of 1
        give 1.667.

        Args:
            metrics: Values by name.
            step: Value of ``trainer/global_step`` in this row.
        """
        session = self._open()
        if session is None:
            return
        self._announce(session)
        if self._module is None and session.topology.world_size > 1:
            session.catch_sigterm()  # in Fabric nobody does; the Trainer has by now, to save a checkpoint
        weights = self._weights_of(metrics) if session.brings_together else None
        session.log(self._prefixed(metrics), step, weights or None)

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Remember which module the Trainer works with; called by it on every rank. Logs no graph.

        Args:
            model: The module.
            input_array: As in the stock logger.
        """
        super().log_graph(model, input_array)
        if isinstance(model, LightningModule):
            self._module = weakref.ref(model)
            _with_trainer.add(self)
            give_advice_only(_needs_sync_dist)

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Write hyperparameters into the config of this rank's run; kept until the run is open.

        Args:
            params: Names and values, or the namespace of an argument parser.
        """
        self._once_open("_log_hyperparams", params)

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Log gradients and parameters of `model` from this rank, if it writes plain names; kept until the run is open.

        Args:
            model: The module to watch.
            log: `"gradients"`, `"parameters"`, `"all"` or `None`.
            log_freq: Number of backward passes between two histograms.
            log_graph: Whether to log the model's graph.
        """
        self._once_open("_watch", model, log, log_freq, log_graph)

    def _watch(self, model: nn.Module, log: str | None, log_freq: int, log_graph: bool) -> None:
        """W&B writes what it watches under plain names, which in a shared run are the primary's alone."""
        session = self._open()
        if session is not None and session.plan.primary:
            super().watch(model, log, log_freq, log_graph)

    def _log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """In a shared run, what the primary has is not said again by others: W&B keeps what came last."""
        session, write = self._open(), inspect.unwrap(WandbLogger.log_hyperparams)
        if session is None or not session.plan.shared or session.plan.primary:
            write(self, params)
            return
        with session.unchanged_config() as known:
            values = vars(params) if isinstance(params, Namespace) else params
            write(self, {name: value for name, value in values.items() if name not in known})

    _log_table = _where_runs_are(WandbLogger.log_table)
    log_text = _where_runs_are(WandbLogger.log_text)
    _log_image = _where_runs_are(WandbLogger.log_image)
    log_audio = _where_runs_are(WandbLogger.log_audio)
    log_video = _where_runs_are(WandbLogger.log_video)

    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        gather: bool = False,
        limit: int | None = None,
    ) -> None:
        """Log a table, from `columns` and `data` or from `dataframe`.

        Args:
            key: Its name.
            columns: Names of the columns.
            data: Rows.
            dataframe: A data frame of pandas, in place of the two.
            step: Value of ``trainer/global_step`` in its row.
            gather: Whether the rows of all ranks become one table, with a column ``rank``; call it on every rank. See
                `dist_wandb.gathered`.
            limit: How many rows all ranks may give together; only with `gather`.

        Example:
            Two ranks::

                logger.log_table("predictions", ["label"], [[labels[rank]]], gather=True)
                # rank 0: labels "cat", "dog"; it writes one table, [[0, "cat"], [1, "dog"]] under rank, label
        """
        if gather:
            self._log_value(key, gathered_table(columns, data, dataframe, limit=limit), step)
        else:
            self._log_table(key, columns, data, dataframe, step)

    def log_image(
        self,
        key: str,
        images: list[Any],
        step: int | None = None,
        *,
        gather: bool = False,
        limit: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log images: tensors, arrays, images of PIL, paths.

        Args:
            key: Their name.
            images: The images.
            step: Value of ``trainer/global_step`` in their row.
            gather: Whether the images of all ranks become one panel, with the rank in their captions; call it on every
                rank. See `dist_wandb.gathered`.
            limit: How many images all ranks may give together; only with `gather`.
            **kwargs: Arguments of `wandb.Image`, as lists with one item per image; with `gather` not `masks`.

        Example:
            Two ranks::

                logger.log_image("samples", [image], caption=["cat"], gather=True)
                # rank 0 writes one panel: "rank 0: cat", "rank 1: cat"
        """
        if gather:
            self._log_value(key, gathered(images, limit=limit, **kwargs), step)
        else:
            self._log_image(key, images, step, **kwargs)

    def _log_value(self, key: str, value: Any, step: int | None) -> None:
        self.log_metrics({key: value}, step)

    @property
    def version(self) -> str | None:
        """Id of the run that this rank's numbers go to, as far as it is known; else the id given to the constructor."""
        if self._experiment is not None:
            return self._experiment.id
        if self._session is not None:
            return self._session.id
        knows_base_id = self._runs_are_in_children or Launch.detect().is_lightning_child
        return self._base_id if knows_base_id else self._id

    @staticmethod
    def id_in(checkpoint: str | os.PathLike[str], logger: int = 0, *, weights_only: bool = True) -> str:
        """The run id in a checkpoint that a Trainer with this logger has saved, to continue its runs.

        Args:
            checkpoint: Path of the checkpoint: a file, or the directory of a sharded one.
            logger: Which logger's, in the order in which the script made them, where it had several.
            weights_only: Whether plain data alone is read: nothing that the file holds is executed, also if it holds
                objects of any class, and tensors are not read. Without it `torch.load` reads all of it, which may run
                code: for files that you trust, and whose plain data is more than 64 MiB.

        Returns:
            The id that the runs of all ranks are made from.

        Raises:
            ReadError: The file cannot be read, or holds no id that W&B takes.

        Example:
            Two ranks with ``run_mode="new"``, which go on with the runs ``ID-rank-0`` and ``ID-rank-1``::

                logger = DistWandbLogger(run_mode="new", id=DistWandbLogger.id_in("last.ckpt"), resume="allow")
                Trainer(strategy="ddp", devices=2, logger=logger).fit(model, ckpt_path="last.ckpt")
        """
        return base_id_in(checkpoint, logger, weights_only=weights_only)

    def finalize(self, status: str) -> None:
        """Log the checkpoints that are due, as the stock logger does; finish the run if this process ends with it.

        Args:
            status: `"success"`, or anything else for a failure.
        """
        super().finalize(status)
        if self._session is not None:
            self._session.fail(1 if status == "failed" else None)
        if self._session is not None and status == "success":
            # The Trainer calls this on all ranks. What is looked at after it has returned must be there.
            self._session.flush(together=True)
        if self._session is not None and os.getpid() != self._home:  # a process that a spawn or fork strategy made
            self._session.finish(exit_code=None if status == "success" else 1)
            self._session = self._experiment = None

    def __getstate__(self) -> dict[str, Any]:
        """Prepare for the processes of ddp_spawn: nothing of theirs comes back, so the ids are fixed here."""
        if self._may_hold_run_for_children():
            _ = self.experiment  # as the stock logger: one run for all that the Trainer does, held by this process
        elif get_spawning_popen() is not None and self._session is None:
            self._runs_are_in_children = True
        elif get_spawning_popen() is not None and self._opened_run is not None:
            raise _opened_too_early(self._opened_run.id, self._options.run_mode, "its own runs in those processes")
        state = self.__dict__.copy()
        state["_place"] = run_metadata.location(self._opened_run) if self._opened_run is not None else self._place
        state["_parents_run"] = handover.pickled(self._opened_run) or self._parents_run
        state["_experiment"] = state["_session"] = state["_module"] = None
        self._is_announced = self._is_announced or get_spawning_popen() is not None  # by rank 0, which comes first
        state["_runs_are_in_children"] = False
        return state

    @property
    def _trainer(self) -> Trainer | None:
        module = self._module() if self._module else None
        with suppress(RuntimeError):  # it has none
            return module.trainer if module is not None else None
        return None

    def _look_back(self) -> None:
        """Know the base id before there are ranks, if an earlier start of the job is continued."""
        if self._id is not None or not self._is_first_process() or Launch.detect().is_lightning_child:
            return
        door = resuming.session_name(_DOOR, self._number)
        earlier = RestartStore(door, self._options, Topology.single(), self._wandb_init).find()
        if earlier is not None:
            self._base_id = earlier.note.base_id
            _script_ids.offer(self._number, self._base_id)

    def _weights_of(self, metrics: Mapping[str, float]) -> Mapping[str, float | Tensor]:
        """The weights of a row as Lightning gives it, by the names that the row gets here."""
        return self._prefixed(epoch_weights(self._module() if self._module else None, metrics))

    def _prefixed(self, row: Mapping[str, _Item]) -> Mapping[str, _Item]:
        if not self._prefix:
            return row
        return {f"{self._prefix}{self.LOGGER_JOIN_CHAR}{name}": value for name, value in row.items()}

    @property
    def _opened_run(self) -> Run | None:
        return cast("Run | None", self._experiment)  # the stock logger's type names a class of older versions of wandb

    def _may_hold_run_for_children(self) -> bool:
        """Whether the run of this node's processes is certain before they exist."""
        node_rank = Launch.detect().node_rank
        return self._options.run_mode == "auto" and (
            node_rank is None or (node_rank == 0 and self._options.rank_scope == "global")
        )

    def _once_open(self, method: str, *args: Any) -> None:
        """Make a call on the run now; or, if it could open the wrong run before the ranks are known, later."""
        if self._options.run_mode != "auto" and self._session is None and self._known_topology() is None:
            self._kept_calls.append((method, args))
        else:
            getattr(self, method)(*args)

    def _open(self) -> Session | None:
        """The session, as soon as the ranks are known; before that, in the first process alone, that of a world of one.

        A session of a world of one is provisional: the Trainer may start further processes after it was opened.
        """
        session = self._session
        if session is not None and session.topology.world_size > 1:
            if not session.has_met:  # this is on the way of every row
                session.meet(self._init_arguments(session.topology), _DOOR, self._number)
            return session
        topology = Topology.from_torch_distributed() or (self._known_topology() if session is None else None)
        if session is not None and (topology is None or topology.world_size == 1):
            return session
        if topology is None and not self._is_first_process():
            return None
        return self._open_session(topology or Topology.single())

    def _known_topology(self) -> Topology | None:
        """Who this rank is; `None` as long as the Trainer may yet start processes, or has not numbered them."""
        topology = Topology.from_torch_distributed()
        if topology is not None or Launch.detect().is_lightning_child:
            return topology
        with suppress(TopologyError):  # half a launcher's variables: Lightning asks for these, and numbers ranks later
            return Topology.from_environ()
        return None

    def _is_first_process(self) -> bool:
        """Whether this is the process a world of one would be, as far as can be known before the Trainer starts."""
        rank: int = rank_zero_only.rank  # type: ignore[attr-defined]  # public, but set on a function
        return rank == 0 and not Launch.detect().node_rank and not self._runs_are_in_children

    def _open_session(self, topology: Topology) -> Session:
        is_another = self._session is None and self._is_another(run_metadata.running_run())
        provisional, in_hand = self._session, None if is_another else self._run_in_hand(topology)
        if self._offline and self._opened_run is None:
            requested.set_offline()
        self._session = open_session(
            self._options,
            self._init_arguments(topology),
            door=_DOOR,
            topology=topology,
            step_metric=None if self._wandb_init.get("sync_tensorboard") else _STEP_METRIC,
            number=self._number,
            proposed_id=in_hand.id if in_hand else self._base_id,
            adopt=lambda plan: self._adopt(in_hand, plan),
            create_new=topology.world_size > 1 or is_another,
            announces=False,
            catches_sigterm=False,  # the Trainer does, to save a checkpoint
            restarts=topology.world_size > 1,  # of a world of one W&B's own way of resuming holds
            as_given=True,
        )
        if provisional is not None:
            provisional.release()
        write_base_ids(_base_ids_of)
        if self._session.owns_run and self._wandb_init.get("sync_tensorboard"):
            axes.define_tensorboard_steps(self._session.run)
        self._take_over(self._session)
        if topology.world_size > 1:
            self._announce(self._session)
        return self._session

    def _announce(self, session: Session) -> None:
        """Say what was decided, once it is certain: a world of one may yet grow until the first row is logged."""
        if not self._is_announced:
            self._is_announced = True
            session.announce(self._place)

    def _init_arguments(self, topology: Topology) -> dict[str, Any]:
        """In a world of one exactly the stock logger's; otherwise without what it says by other means."""
        if topology.world_size == 1:
            return self._wandb_init
        arguments = {name: value for name, value in self._wandb_init.items() if name != "anonymous" or value}
        stock = {"resume": "allow", **({"mode": "offline"} if self._offline else {})}  # the stock logger's ways
        unsaid = {name: value for name, value in stock.items() if arguments.get(name) is None}  # as by LightningCLI
        return {**arguments, **unsaid}

    def _is_another(self, running: Run | None) -> bool:
        """Whether the run of this process is another logger's, and not the one that this logger was asked for."""
        return running is not None and self._id not in (None, running.id) and holds(running)

    def _run_in_hand(self, topology: Topology) -> Run | None:
        """A run of this process that is to be used: the early one, the user's, or in `auto` mode the running one."""
        if self._session is not None or self._opened_run is not None:
            return self._opened_run
        running = run_metadata.running_run() if self._options.run_mode == "auto" else None
        if running is None or (topology.world_size > 1 and holds(running)):
            return None
        rank_zero_warn(
            "There is a wandb run already in progress, and DistWandbLogger will use it. If this is not desired, call "
            "`wandb.finish()` before the logger is used."
        )
        return running

    def _adopt(self, in_hand: Run | None, plan: RunPlan) -> Run | None:
        """The run to use instead of opening one: that in hand, or the parent's, in a process that ddp_spawn made."""
        if in_hand is None:
            return handover.unpickled(self._parents_run) if self._parents_run and plan.run_mode == "auto" else None
        if self._session is not None and (plan.shared or plan.run_id != in_hand.id):
            raise _opened_too_early(in_hand.id, plan.run_mode, f"the run {plan.run_id!r} here")
        return in_hand

    def _take_over(self, session: Session) -> None:
        """Bring what the stock logger's methods look at up to date, and make the calls that waited for the run."""
        self._experiment = session.run or None
        self._base_id = session.plan.base_id or (str(session.run.id) if session.run else self._base_id)
        if session.topology.world_size == 1:
            _script_ids.offer(self._number, str(self._base_id))
        kept, self._kept_calls = self._kept_calls, []
        for method, args in kept:
            getattr(self, method)(*args)


_with_trainer: weakref.WeakSet[DistWandbLogger] = weakref.WeakSet()
"""Those that were told a module, and by it a Trainer."""
