"""The integration for PyTorch Lightning: `DistWandbLogger`, in place of Lightning's own `WandbLogger`."""

from __future__ import annotations

import os
import weakref
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dist_wandb.errors import ConfigurationError, MissingExtraError

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loggers import WandbLogger
except ModuleNotFoundError as _error:
    raise MissingExtraError(
        f"DistWandbLogger needs Lightning, but {_error.name!r} is missing. Run: pip install 'dist-wandb[lightning]'"
    ) from _error

from dist_wandb.lightning import stock_methods
from dist_wandb.lightning.checkpoints import base_id_in, write_base_ids
from dist_wandb.lightning.experiment import NullExperiment
from dist_wandb.lightning.session_holder import INTEGRATION, SessionHolder
from dist_wandb.lightning.timings import measure
from dist_wandb.lightning.trainers import base_ids_of, remember, trainer_of
from dist_wandb.lightning.weights import epoch_weights
from dist_wandb.payloads.media.gathers import gathered, gathered_table
from dist_wandb.runs import argument_checks
from dist_wandb.session.session import Session
from dist_wandb.session.step_timings import check_timings
from dist_wandb.settings.limits import DEFAULT_LIMITS, Limits
from dist_wandb.settings.options import ConfigSyncMode, Options, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import PerRank, Reduce, Spread

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dist_wandb.runs.null_run import AnyRun, Run


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
        run_mode: Which ranks open a run: `"auto"`, `"shared"` or `"new"`. All options: see `dist_wandb.init`.
        rank_scope: Which ranks are one unit: `"global"` (all) or `"worker"` (those of a node).
        reduce: How one number comes from the ranks' numbers.
        spread: Of which names the spread over ranks is written too.
        per_rank: Which names each rank of a shared run also writes under its label.
        limits: How long, and how much, is waited: `dist_wandb.Limits`, or a mapping of its arguments.
        config_sync: What to do about ranks that pass different configs: `"warn"`, `"check"` or `"off"`.
        system_metrics: Whose hardware metrics are recorded: `"primary"` or `"all-nodes"`.
        strict: Whether a run that cannot be opened is an error.
        unit: Which ranks' numbers belong together, where not all do: a group, a mesh, a list of ranks, or the name of a
            dimension of the framework's mesh.
        primary_rank: Global rank of the primary; -1 for the last one.
        timings: Whether rows have how long each rank loads data and takes for the passes and the optimizer's step, and
            which rank holds the others up (``docs/timings.md``). While the Trainer fits, it has one callback more; in
            Fabric nothing is measured by itself.
        **kwargs: Further arguments of `wandb.init`; for `resume` see `dist_wandb.init`, and `id_in` for checkpoints.

    Raises:
        ConfigurationError: An argument that cannot be honoured.
        MisconfigurationException: `log_model` together with `offline`, as in the stock logger.

    Note:
        Until the Trainer has started its processes, the ranks are not known. With ``run_mode="auto"``, `experiment` may
        be used before, as with the stock logger. In the other modes pass `config=`, call `log_hyperparams` or `watch`
        (they are kept until the run is open), or use `experiment` from `setup` on.

        Lightning's ddp strategy starts the script again for each further rank. They find the run id in a small file in
        the directory for temporary files, which exists as long as this process. The environment is changed only as by
        the stock logger: ``offline=True`` sets `WANDB_MODE` to ``dryrun`` when the run is opened, so whatever this
        process opens afterwards is offline too.

    Example:
        Two ranks::

            trainer = Trainer(strategy="ddp", devices=2, logger=DistWandbLogger(project="digits", run_mode="new"))
            trainer.fit(model)  # rank 0: run ID-rank-0, rank 1: run ID-rank-1, both in the group ID
    """

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
        timings: bool = False,
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
            **stock_methods.file_policy(add_file_policy),
            **kwargs,
        )
        argument_checks.check_init_arguments(self._wandb_init, INTEGRATION)
        if experiment is not None and not self._options.is_rank_0_primary:
            raise ConfigurationError(
                f"experiment= hands DistWandbLogger a run of rank 0, but primary_rank={self._options.primary_rank} has "
                "another rank write. Leave one of them out."
            )
        if experiment is not None and self._options.run_mode != "auto":
            raise ConfigurationError(
                f"experiment= hands DistWandbLogger one run, but run_mode={self._options.run_mode!r} needs a run of "
                "its own on every rank. Leave experiment out, or use run_mode='auto'."
            )
        self._has_timings = check_timings(timings)
        self._module: weakref.ref[LightningModule] | None = None
        self._kept_calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # pickled for ddp_spawn
        self._holder = SessionHolder(self._options, self._wandb_init, is_offline=offline)

    @property
    def experiment(self) -> AnyRun:
        """The W&B run of this rank. On a rank without one, something that accepts every use and does nothing.

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
        the mean over all samples: rank 0 with 1.0 of 2 samples and rank 1 with 3.0 of 1 give 1.667.

        Args:
            metrics: Values by name.
            step: Value of ``trainer/global_step`` in this row.
        """
        session = self._open()
        if session is None:
            return
        self._holder.announce()
        if self._module is None and session.topology.world_size > 1:
            session.catch_sigterm()  # in Fabric nobody does; the Trainer has by now, to save a checkpoint
        weights = self._weights_of(metrics) if session.brings_together else None
        session.log(stock_methods.prefixed(self, metrics), step, weights or None)

    def log_graph(self, model: nn.Module, input_array: Tensor | None = None) -> None:
        """Remember which module the Trainer works with; called by it on every rank. Logs no graph.

        Args:
            model: The module.
            input_array: As in the stock logger.
        """
        super().log_graph(model, input_array)
        if isinstance(model, LightningModule):
            self._module = weakref.ref(model)
            remember(model)
            trainer = trainer_of(model) if self._has_timings else None
            if trainer is not None:
                measure(trainer, lambda: self._holder.session)

    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Write hyperparameters into the config of this rank's run; kept until the run is open.

        Args:
            params: Names and values, or the namespace of an argument parser.
        """
        self._once_open(stock_methods.log_hyperparams, params)

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
        self._once_open(stock_methods.watch, model, log, log_freq, log_graph)

    _log_table = stock_methods.where_runs_are(WandbLogger.log_table)
    _log_image = stock_methods.where_runs_are(WandbLogger.log_image)
    if not TYPE_CHECKING:  # for type checkers they are the stock logger's
        log_text = stock_methods.where_runs_are(WandbLogger.log_text)
        log_audio = stock_methods.where_runs_are(WandbLogger.log_audio)
        log_video = stock_methods.where_runs_are(WandbLogger.log_video)

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
        """Log images: tensors, arrays, images of PIL, paths.

        Args:
            key: Their name.
            images: The images.
            step: Value of ``trainer/global_step`` in their row.
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
        """Id of the run that this rank's numbers go to, as far as it is known; else the id given to the constructor."""
        if self._experiment is not None:
            return self._experiment.id
        return self._holder.known_id

    @staticmethod
    def id_in(checkpoint: str | os.PathLike[str], logger: int = 0, *, weights_only: bool = True) -> str:
        """The run id in a checkpoint that a Trainer with this logger has saved, to continue its runs.

        Args:
            checkpoint: Path of the checkpoint: a file, or the directory of a sharded one.
            logger: Which logger's, in the order in which the script made them, where it had several.
            weights_only: Whether only plain data is read, up to 64 MiB, and nothing of the file is executed. Otherwise
                `torch.load` reads all of it, which may execute code: for files that you trust.

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
        session = self._holder.session
        if session is None:
            return
        session.fail(1 if status == "failed" else None)
        if status == "success":
            session.flush(together=True)  # on all ranks; what users read afterwards must be there
        if self._holder.launch.is_child:
            session.finish(exit_code=None if status == "success" else 1)
            self._holder.session = self._experiment = None

    def __getstate__(self) -> dict[str, Any]:
        """Prepare for the processes of ddp_spawn: nothing of theirs comes back, so the ids are fixed here."""
        if self._holder.may_hold_run_for_children:
            _ = self.experiment  # as the stock logger: one run for all that the Trainer does, held by this process
        else:
            self._holder.prepare_spawn(self._experiment)
        holder = self._holder.for_copy(self._experiment)
        return {**self.__dict__, "_holder": holder, "_experiment": None, "_module": None}

    def _weights_of(self, metrics: Mapping[str, float]) -> Mapping[str, float | Tensor]:
        """The weights of a row as Lightning gives it, by the names that the row gets here."""
        return stock_methods.prefixed(self, epoch_weights(self._module() if self._module else None, metrics))

    def _once_open(self, function: Callable[..., None], *args: Any) -> None:
        """Make a call on the run now; or, if it could open the wrong run before the ranks are known, later."""
        if self._holder.may_open:
            function(self, self._open(), *args)
        else:
            self._kept_calls.append((function, args))

    def _open(self) -> Session | None:
        """The session, as `SessionHolder.open` has it; what the stock logger's methods look at is up to date then."""
        before = self._holder.session
        session = self._holder.open(self._experiment)
        if session is not None and session is not before:
            write_base_ids(base_ids_of)
            self._experiment = session.run or None
            kept, self._kept_calls = self._kept_calls, []
            for function, args in kept:
                function(self, session, *args)
        return session
