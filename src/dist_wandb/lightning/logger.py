"""The integration for PyTorch Lightning: `DistWandbLogger`, in place of Lightning's own `WandbLogger`."""

from __future__ import annotations

import os
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.launch import Launch
from dist_wandb.lightning import name_spaces
from dist_wandb.lightning.checkpoints import base_id_in, write_base_ids
from dist_wandb.lightning.launching import is_spawning, known_topology
from dist_wandb.lightning.name_spaces import StockLogger, is_a
from dist_wandb.lightning.session_holder import INTEGRATION, NullExperiment, SessionHolder
from dist_wandb.lightning.trainers import epoch_reductions, epoch_weights, measure, remember, trainer_of
from dist_wandb.payloads.gathers import gathered, gathered_table
from dist_wandb.payloads.scalars import check_row
from dist_wandb.runs import requested
from dist_wandb.session.registry import process_end, repr_with
from dist_wandb.session.sections import check_timings
from dist_wandb.session.session import Session
from dist_wandb.session.stalls.verdict import Stall
from dist_wandb.settings.options import DEFAULT_LIMITS, ConfigSyncMode, Limits, Options, StallTimeout, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import PerRank, Reduce, Spread

if TYPE_CHECKING:
    from torch import Tensor, nn
    from typing_extensions import Unpack

    from dist_wandb.runs.null_run import AnyRun, Run


class DistWandbLogger(StockLogger):
    """Weights & Biases logger for Lightning that knows about all ranks.

    Use it in place of `lightning.pytorch.loggers.WandbLogger` or `pytorch_lightning.loggers.WandbLogger`: it is an
    instance of the one that the script has imported, takes the same arguments in the same order, and at world size 1 it
    makes the same calls. Works in a `Trainer` and in Fabric (``Fabric(loggers=[DistWandbLogger()])``).

    Args:
        name: Display name of the run.
        save_dir: Directory that contains W&B's directory.
        version: Run id; the same as `id`.
        offline: Whether to write the run to disk only.
        dir: The same as `save_dir`.
        id: Run id, from which the ids of all runs of the job are made.
        anonymous: As in the stock logger.
        project: Name of the W&B project.
        log_model: Whether to upload checkpoints as artifacts: `False`, `True` (at the end) or `"all"` (as they are
            saved).
        experiment: A W&B run to log into, instead of opening one. Only with ``run_mode="auto"``.
        prefix: Text in front of the name of every metric.
        checkpoint_name: Name of the checkpoint artifact.
        add_file_policy: `"mutable"` to copy checkpoints before the upload, else `"immutable"`.
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
        timings: Whether to write how long each rank takes to load data, for the passes and for the optimizer's step,
            and which rank holds the others up (``docs/timings.md``). The Trainer has one more callback while it fits;
            in Fabric nothing is measured automatically.
        **kwargs: Further arguments of `wandb.init`; for `resume` see `dist_wandb.init`, and `id_in` for checkpoints.

    Raises:
        ConfigurationError: An argument that cannot be honoured.
        MisconfigurationException: `log_model` together with `offline`, as in the stock logger.

    Note:
        The ranks are not known until the Trainer has started its processes. With ``run_mode="auto"``, `experiment` may
        be used before, as with the stock logger. In the other modes pass `config=`, call `log_hyperparams` or `watch`
        (they take effect when the run is opened), or use `experiment` from `setup` on.

        Lightning's ddp strategy starts the script again for each further rank. These processes find the run id, and
        the config and metadata of a run that is open by then (no secrets), in a small file in the directory for
        temporary files, which exists as long as this process; so `experiment` reads the same there before `fit`, too. A
        rank that has read other values than the run's gets a warning. The environment is
        changed only as by the stock logger: ``offline=True`` sets `WANDB_MODE` to ``dryrun`` when the run is opened, so
        any run that this process opens afterwards is offline too.

    Example:
        Two ranks::

            trainer = Trainer(strategy="ddp", devices=2, logger=DistWandbLogger(project="digits", run_mode="new"))
            trainer.fit(model)  # rank 0: run ID-rank-0, rank 1: run ID-rank-1, both in the group ID
    """

    _home = f"{__name__}:DistWandbLogger"
    __module__ = "dist_wandb"  # there, LightningCLI finds it with its base classes
    __repr__ = repr_with(lambda self: self._holder.session)
    _experiment: Run | None  # the stock logger's type names a class of older versions

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
        unit: Any = None,  # `UnitArgument`, but LightningCLI resolves the types, also without a ProcessGroup
        primary_rank: int | None = None,
        stall_timeout: StallTimeout = "auto",
        on_stall: Callable[[Stall], object] | None = None,
        timings: bool = False,
        **kwargs: Unpack[requested.LoggerArguments],
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
            **name_spaces.file_policy(self, add_file_policy),
            **kwargs,
        )
        requested.check_init_arguments(self._wandb_init, INTEGRATION)
        if experiment is not None and not self._options.is_rank_0_primary:
            raise ConfigurationError(
                "experiment= hands DistWandbLogger a run of rank 0, but with "
                f"primary_rank={self._options.primary_rank} another rank writes. Leave one of them out."
            )
        if experiment is not None and self._options.run_mode != "auto":
            raise ConfigurationError(
                f"experiment= hands DistWandbLogger one run, but run_mode={self._options.run_mode!r} needs a run of "
                "its own on every rank. Leave experiment out, or use run_mode='auto'."
            )
        self._has_timings = check_timings(timings)
        self._module: weakref.ref[nn.Module] | None = None
        self._kept_calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # pickled for ddp_spawn
        self._holder = SessionHolder(self._options, self._wandb_init, is_offline=offline)

    @property
    def experiment(self) -> AnyRun:
        """The W&B run of this rank; on a rank without a run, a stand-in that accepts every use and does nothing.

        Raises:
            ConfigurationError: It was used before the Trainer started its processes, and the run that was opened then
                is not the one that the run mode needs.
        """
        session = self._open()
        if session is None or not session.run:
            return NullExperiment(self._holder)
        return session.run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log one row of this rank; called by Lightning on every rank.

        Epoch means are weighted with the number of samples behind them on each rank, so that their mean over ranks is
        the mean over all samples: 1.0 from 2 samples on rank 0 and 3.0 from 1 sample on rank 1 give 1.667. Names that
        the module logs with ``reduce_fx="max"``, ``"min"`` or ``"sum"`` have this reduction over ranks, too.

        Args:
            metrics: Values by name.
            step: Value of ``trainer/global_step`` in this row.
        """
        if (session := self._open()) is None:
            return
        check_row(metrics, session.topology.global_rank)
        self._holder.announce()
        if self._module is None and session.topology.world_size > 1:
            process_end.catch_sigterm()  # Fabric does not; the Trainer has done so by now, to save a checkpoint
        row, weights = name_spaces.prefixed(self, metrics), None
        if step is not None and (type(step) is not int or step < 0 or self._holder.axis in row):
            row, step = name_spaces.placed(row, step, self._holder.axis)
        if session.reduces:
            module = self._module() if self._module else None
            weights = name_spaces.prefixed(self, epoch_weights(module, metrics))
            if not row.keys() <= session.reductions.known.keys():
                session.reductions.defaults.update(name_spaces.prefixed(self, epoch_reductions(module, metrics)))
        session.log(row, step, commit=True, weight=weights or None)
        session.lead(step)

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Remember the Trainer's module; called by the Trainer on every rank. Logs no graph."""
        super().log_graph(model, input_array)
        if is_a(model, "LightningModule"):
            self._module = weakref.ref(model)
            remember(model)
            trainer = trainer_of(model) if self._has_timings else None
            if trainer is not None:
                measure(trainer, lambda: self._holder.session)

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Write hyperparameters into the config of this rank's run, once it is open.

        Args:
            params: Values by name, or the namespace of an argument parser.
        """
        self._once_open(name_spaces.log_hyperparams, params)

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Log gradients and parameters of `model` from this rank, if it writes plain names, once its run is open.

        Args:
            model: The module to watch.
            log: `"gradients"`, `"parameters"`, `"all"` or `None`.
            log_freq: Number of backward passes from one histogram to the next.
            log_graph: Whether to log the model's graph.
        """
        self._once_open(name_spaces.watch, model, log, log_freq, log_graph)

    _log_table = name_spaces.where_runs_are("log_table")
    _log_image = name_spaces.where_runs_are("log_image")
    if not TYPE_CHECKING:  # type checkers see the stock logger's methods
        log_text = name_spaces.where_runs_are("log_text")
        log_audio = name_spaces.where_runs_are("log_audio")
        log_video = name_spaces.where_runs_are("log_video")

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
            key: Name of the table.
            columns: Names of the columns.
            data: Rows.
            dataframe: A pandas data frame, instead of `columns` and `data`.
            step: Value of ``trainer/global_step`` in the row of the table.
            gather: Whether the rows of all ranks become one table (`dist_wandb.gathered`); call it on every rank.
            limit: As in `dist_wandb.gathered`; only with `gather`.

        Example:
            Two ranks::

                logger.log_table("predictions", ["label"], [[labels[rank]]], gather=True)
                # rank 0: labels "cat", "dog"; it writes one table, [[0, "cat"], [1, "dog"]] under rank, label
        """
        if gather:
            table: Any = gathered_table(columns, data, dataframe, limit=limit)
            self.log_metrics({key: table}, step)
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
        """Log images.

        Args:
            key: Name of the images.
            images: Tensors, arrays, PIL images or paths.
            step: Value of ``trainer/global_step`` in the row of the images.
            gather: Whether the images of all ranks become one panel (`dist_wandb.gathered`); call it on every rank.
            limit: As in `dist_wandb.gathered`; only with `gather`.
            **kwargs: Arguments of `wandb.Image`, as lists with one item per image; with `gather` not `masks`.

        Example:
            Two ranks::

                logger.log_image("samples", [image], caption=["cat"], gather=True)
                # rank 0 writes one panel: "rank 0: cat", "rank 1: cat"
        """
        if gather:
            panel: Any = gathered(images, limit=limit, **kwargs)
            self.log_metrics({key: panel}, step)
        else:
            self._log_image(key, images, step, **kwargs)

    @property
    def version(self) -> str | None:
        """Id of the run that receives this rank's numbers, if it is known; else the id given to the constructor."""
        if self._experiment is not None:
            return self._experiment.id
        return self._holder.known_id

    @staticmethod
    def id_in(checkpoint: str | os.PathLike[str], logger: int = 0, *, weights_only: bool = True) -> str:
        """Read the run id from a checkpoint that a Trainer with this logger has saved, to continue its runs.

        Args:
            checkpoint: Path of the checkpoint: a file, or the directory of a sharded one.
            logger: Index of the logger, in the order in which the script created its loggers.
            weights_only: Whether to read only plain data, up to 64 MiB, and execute nothing in the file. Otherwise
                `torch.load` reads all of it, which may execute code: only for files that you trust.

        Returns:
            The id from which the run ids of all ranks are made.

        Raises:
            ReadError: The file cannot be read, or does not contain an id that W&B accepts.

        Example:
            Two ranks with ``run_mode="new"``, which continue the runs ``ID-rank-0`` and ``ID-rank-1``::

                logger = DistWandbLogger(run_mode="new", id=DistWandbLogger.id_in("last.ckpt"), resume="allow")
                Trainer(strategy="ddp", devices=2, logger=logger).fit(model, ckpt_path="last.ckpt")
        """
        return base_id_in(checkpoint, logger, weights_only=weights_only)

    def finalize(self, status: str) -> None:
        """Log the remaining checkpoints, as the stock logger does; finish the run if the Trainer ends this process.

        `status` is `"success"`, or any other value for a failure.
        """
        super().finalize(status)
        session = self._holder.session
        if session is None:
            return
        error = sys.exc_info()[0]  # `SystemExit` has a code of its own; Lightning's for SIGTERM is derived from it
        session.fail(1 if status == "failed" and error is not SystemExit else None)
        if status == "success":
            session.flush(together=True, commit=False)  # on all ranks, so that users can read the values afterwards
        # After Ctrl-C, Lightning kills the ranks that it has started, and soon this one if it still waits for them.
        if self._holder.launch.is_child or (error is KeyboardInterrupt and session.topology.world_size > 1):
            self._holder.leave(None if status == "success" else 1)
            self._experiment = None

    def __getstate__(self) -> dict[str, Any]:
        """Prepare for the processes of ddp_spawn: they return nothing to this one, so the ids are fixed here."""
        # Is the run of this node's processes known before they exist?
        node_rank, options = Launch.detect().node_rank, self._options
        is_first = node_rank is None or (node_rank == 0 and options.rank_scope == "global")
        if options.is_run_of_rank_0 and is_first:
            _ = self.experiment  # as in the stock logger: this process holds one run for all stages of the Trainer
        else:
            self._holder.prepare_spawn(self._experiment)
        if self._holder.session is not None and is_spawning():  # a further stage: `finalize` tells if it fails, too
            self._holder.session.fail(None)
        holder = self._holder.for_copy(self._experiment)
        return {**self.__dict__, "_holder": holder, "_experiment": None, "_module": None}

    def _once_open(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function with the session; later, if that could open the wrong run before the ranks are known."""
        holder = self._holder  # once the ranks are known, or rank 0's run is the only one
        if holder.options.is_run_of_rank_0 or holder.session is not None or known_topology() is not None:
            function(self, self._open(), *args)
        else:
            self._kept_calls.append((function, args))

    def _open(self) -> Session | None:
        """Return the session as `SessionHolder.open` does, and update the attribute that the stock methods use."""
        before = self._holder.session
        session = self._holder.open(self._experiment)
        if session is not None and session is not before:
            write_base_ids()
            self._experiment = session.run or None
            kept, self._kept_calls = self._kept_calls, []
            for function, args in kept:
                function(self, session, *args)
        return session
