"""The integration for the Hugging Face Trainer: `DistWandbCallback`, in place of its `WandbCallback`.

Importing it makes ``report_to="dist_wandb"`` work.

The Trainer calls its callbacks on every rank. The stock callback acts if `state.is_world_process_zero`; this one opens
a session and logs on all ranks, and lets the stock methods act on the primary, with the run of the session.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import MissingExtraError

try:
    from transformers.integrations import integration_utils
    from transformers.integrations.integration_utils import WandbCallback, rewrite_logs
    from transformers.trainer_callback import DefaultFlowCallback
except ModuleNotFoundError as _error:
    raise MissingExtraError(
        f"DistWandbCallback needs transformers, but {_error.name!r} is missing. Run: pip install "
        "'dist-wandb[transformers]'"
    ) from _error

import dist_wandb
from dist_wandb.accelerate.start import current_mesh
from dist_wandb.accelerate.timings import PreparedTimings
from dist_wandb.job.launch import job_setting
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import UnitArgument
from dist_wandb.notices import Notices
from dist_wandb.runs import run_metadata, sweeps
from dist_wandb.runs.requested import WandbArguments, check_init_arguments
from dist_wandb.session.api import join_init
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import current, open_sessions, repr_with
from dist_wandb.session.sections import check_timings
from dist_wandb.session.stalls.verdict import Stall
from dist_wandb.settings.options import DEFAULT_LIMITS, ConfigSyncMode, Limits, Options, StallTimeout, SystemMetrics
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import ALREADY_REDUCED, PerRank, Reduce, Spread

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from dist_wandb.runs.null_run import AnyRun
    from dist_wandb.session.session import Session

INTEGRATION = "DistWandbCallback"
NAME = "dist_wandb"
_STEP_METRIC = "train/global_step"
_OF_INTEGRATIONS = "transformers.integrations."
_IN_SUMMARY = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


class DistWandbCallback(WandbCallback):  # type: ignore[misc]  # its base class is not typed
    """Weights & Biases callback for the Hugging Face Trainer that reaches all ranks.

    Pass an instance in `callbacks`, with ``report_to="none"``; or pass ``report_to="dist_wandb"`` once
    `dist_wandb.transformers` is imported. The environment variables of the stock callback (`WANDB_PROJECT`,
    `WANDB_WATCH`, `WANDB_LOG_MODEL`) have the same effect here.

    Trainers that write to wandb themselves ask before whether ``"wandb" in args.report_to`` (trl's tables of
    completions, for example). It is true once this callback belongs to a Trainer; the list has no further item, so
    another Trainer with the same arguments does not create the stock callback.

    Args:
        project: Name of the W&B project; `WANDB_PROJECT` by default, else ``"huggingface"``.
        run_mode: Which ranks open a run: `"auto"`, `"shared"` or `"new"`. All options: see `dist_wandb.init`.
        rank_scope: Which ranks are one unit: `"global"` (all) or `"worker"` (those of a node).
        reduce: How the numbers of the ranks are reduced to one. Numbers that the Trainer has reduced are not summed.
        spread: The names whose spread over ranks is written too.
        per_rank: The names that each rank of a shared run also writes under its label.
        limits: Time limits in seconds, and how many rows may wait: `dist_wandb.Limits`, or a mapping of its arguments.
        config_sync: What to do if ranks pass different configs: `"warn"`, `"check"` or `"off"`.
        system_metrics: Whose hardware metrics are recorded: `"primary"` or `"all-nodes"`.
        strict: Whether a run that cannot be opened is an error.
        unit: The ranks whose numbers belong together, if not all: a group, a mesh, a list of ranks, or the name of a
            dimension of Accelerate's mesh.
        primary_rank: Global rank of the primary; -1 for the last one.
        stall_timeout: Seconds without a sign of any rank until a message says where the ranks stand: `"auto"` for at
            least 300, `None` for never.
        on_stall: A function that is called with the same as data.
        timings: Whether to measure loading, forward pass, backward pass and update of each rank while the Trainer
            trains, and to name the rank that holds the others up. Meanwhile the loader, the model and the optimizer
            have hooks.
        **init_kwargs: Further arguments of `wandb.init`. They take precedence over those of `TrainingArguments`.

    Raises:
        ConfigurationError: An argument that cannot be honoured; the nearest argument of `wandb.init` is named.

    Example:
        Two processes under torchrun, each of which computes a number of its own::

            class OwnTrainer(Trainer):
                def log(self, logs, *args, **kwargs):
                    logs["reward"] = reward  # rank 0: 1.0, rank 1: 2.0
                    super().log(logs, *args, **kwargs)

            arguments = TrainingArguments("out", report_to="none")
            trainer = OwnTrainer(model, arguments, ..., callbacks=[DistWandbCallback()])
            trainer.train()  # rank 0 writes train/reward=1.5, and train/loss as the Trainer has reduced it
    """

    __repr__ = repr_with(lambda self: self._session)

    def __init__(
        self,
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
        unit: UnitArgument = None,
        primary_rank: int | None = None,
        stall_timeout: StallTimeout = "auto",
        on_stall: Callable[[Stall], object] | None = None,
        timings: bool = False,
        **init_kwargs: Unpack[WandbArguments],
    ) -> None:
        super().__init__()
        options = {**locals(), "reduce": without_second_sum(reduce)}
        self._options = Options.among(options)
        check_init_arguments(init_kwargs, INTEGRATION)
        self._arguments = init_kwargs if project is None else {"project": project, **init_kwargs}
        self._session: Session | None = None
        self._has_other_axis = False
        self._set_up_for: Any = None  # the arguments of the last Trainer whose config was written
        self._notices = Notices()
        measured = PreparedTimings(lambda: self._session, in_trainer=True)
        self._prepared = measured if check_timings(timings) else None

    @property
    def session(self) -> Session | None:
        """The session of this rank; `None` until the Trainer begins to train, evaluates or logs."""
        return self._session

    @property
    def run(self) -> AnyRun | None:
        """The W&B run of this rank; on a rank without a run, a stand-in that accepts every use and does nothing."""
        return None if self._session is None else self._session.run

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Let code that asks whether the Trainer reports to wandb find that it does, and callbacks an open run."""
        _precede_others(self)
        if "wandb" not in args.report_to:
            args.report_to = _WithWandb(args.report_to)

    def setup(self, args: Any, state: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the session of this rank, and let the stock callback set up the run of the primary."""
        self.on_init_end(args, state, None)  # the callback may have been added to an existing Trainer
        if (
            args.process_index == 0
            and "wandb" in [*args.report_to]
            and any(type(other) is WandbCallback for one in _lists_with(self) for other in one)
        ):
            self._notices.warn(
                "both",
                "the Trainer also reports to wandb (report_to): the stock callback writes the same names a second "
                'time, from rank 0 only. Pass TrainingArguments(report_to="none").',
            )
        # The stock callback also uses a run that is open.
        of_script = current() or join_init(self._options, _topology(args), INTEGRATION)
        self._session, self._has_other_axis = of_script or self._open(args, state), of_script is not None
        self._wandb = _AsWandb(self._session)
        # transformers 4 names runs by their directory unless a name was given.
        named = _named(args, state, self._arguments).items()
        asked = {name: value for name, value in named if value != args.output_dir}
        ignored = run_metadata.without_effect(asked, self._session.run)
        if self._session.plan.announces and not (of_script is None and self._session.owns_run) and ignored:
            self._notices.warn(
                "open run",
                f"the Trainer uses the run {self._session.id}, which is open, so these arguments have no effect: "
                f"{ignored}. For another run, call wandb.finish() before.",
            )
        seen = copy.copy(state)  # the stock callback acts on process zero: here, on the primary of a unit
        seen.is_world_process_zero = self._session.plan.primary
        super().setup(args, seen, model, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a training, or another trial of a hyperparameter search in a run of its own."""
        if state.is_hyper_param_search:
            if not sweeps.is_trial():
                dist_wandb.finish()  # also a run of the script's, as the stock callback does
            elif self._session is not None:
                self._session.finish()
            self._session, self._initialized = None, False
            args.run_name = None
        another = args is not self._set_up_for  # another Trainer writes its config, as with wandb
        self._ready(args, state, model, anew=another, **kwargs)
        if self._prepared is not None:
            self._prepared.end()  # for a training that has failed before
            is_compiled = getattr(args, "torch_compile", False)  # the hooks would be compiled as well
            trained = [kwargs.get("train_dataloader"), kwargs.get("optimizer"), None if is_compiled else model]
            self._prepared.measure(trained)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the values that the Trainer, or a subclass of it, logs on this rank."""
        session = self._ready(args, state, model)
        for name in _IN_SUMMARY:
            if name in logs:
                session.run.summary[name] = logs[name]
        self._log({name: value for name, value in logs.items() if name not in _IN_SUMMARY}, session, state)

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Log the metrics of a prediction."""
        self._log(metrics, self._ready(args, state, kwargs.get("model")), state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With ``WANDB_LOG_MODEL=checkpoint``, upload a checkpoint from rank 0, which has saved it."""
        if self._uploads(state):
            super().on_save(args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With ``WANDB_LOG_MODEL=checkpoint`` or ``end``, upload the model from rank 0, which saves it."""
        if self._prepared is not None:
            self._prepared.end()
        if self._uploads(state):
            super().on_train_end(args, state, control, **kwargs)

    def _uploads(self, state: Any) -> bool:
        """Whether this rank uploads the model: rank 0, on which the Trainer saves it, if it has a run."""
        if not (state.is_world_process_zero and self._log_model.is_enabled and self._session is not None):
            return False
        if not self._session.plan.opens_run:
            self._notices.warn(
                "no model",
                f"WANDB_LOG_MODEL={self._log_model.value}, but rank 0, on which the Trainer saves the model, has no "
                "run, so it is not uploaded. Pass run_mode='shared', or leave primary_rank and unit out.",
            )
        return bool(self._session.plan.opens_run)

    def _log(self, values: Mapping[str, Any], session: Session, state: Any) -> None:
        """Log values under the stock callback's names, and its x axis too if the script's session has another one."""
        axes, step = dict[str, int](), state.global_step
        if self._has_other_axis and session.axis is not None:  # as values: `step=` would end a row that is left open
            axes, step = dict.fromkeys((_STEP_METRIC, session.axis), step), None
        session.log({**rewrite_logs(values), **axes}, step, commit=True)

    def _ready(self, args: Any, state: Any, model: Any, *, anew: bool = False, **kwargs: Any) -> Session:
        """Return the session of this rank. If a subclass overrides `setup`, with the run that it has opened, if any."""
        if anew or not (self._initialized and self._session in open_sessions()):
            self.setup(args, state, model, **kwargs)
            self._set_up_for = args
        session = self._session
        if session is None or session not in open_sessions():
            session = self._session = current() or self._open(args, state)
            self._initialized = True
        return session

    def _open(self, args: Any, state: Any) -> Session:
        topology = _topology(args)
        running = run_metadata.running_run() if self._options.run_mode == "auto" else None
        of_job = job_setting("WANDB_PROJECT")
        return open_session(
            self._options.in_mesh(current_mesh(), topology.global_rank),
            {"project": "huggingface" if of_job is None else of_job, **_named(args, state, self._arguments)},
            integration=INTEGRATION,
            topology=topology,
            step_metric=_STEP_METRIC,
            proposed_id=running.id if running else None,
            adopt=lambda _plan: running,  # the stock callback also uses a run that is open
        )


def _topology(args: Any) -> Topology:
    return Topology.from_framework(args.process_index, args.world_size, "transformers.TrainingArguments")


def _named(args: Any, state: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `wandb.init`, with the Trainer's name of the run, without a default project."""
    given: dict[str, Any] = {}
    if state.trial_name is not None:
        given |= {"name": state.trial_name, "group": args.run_name or args.output_dir}
    elif args.run_name is not None:
        given["name"] = args.run_name
    return {**given, **arguments}


def _lists_with(callback: DistWandbCallback) -> list[list[Any]]:
    """Return the lists that hold this callback, among them that of its Trainer, which is not passed to callbacks."""
    return [one for one in gc.get_referrers(callback) if isinstance(one, list)]


def _precede_others(callback: DistWandbCallback) -> None:
    """Move this callback in front of the script's own, where the Trainer has the stock one: these use the open run."""
    # Also while the Trainer calls the callbacks in this list: each of them is called once.
    for callbacks in _lists_with(callback):
        if isinstance(callbacks[0], DefaultFlowCallback):  # not a list of the script's
            at = callbacks.index(callback)
            # Also in front of the Trainer's own that prints the rows: it takes `total_flos` out of them.
            others = (i for i in range(1, at) if not type(callbacks[i]).__module__.startswith(_OF_INTEGRATIONS))
            callbacks.insert(next(others, at), callbacks.pop(at))


def without_second_sum(reduce: Reduce) -> Reduce:
    """Return the reductions, changed so that numbers that the Trainer has reduced are not summed over ranks.

    The Trainer gathers its loss and the predictions for its metrics, and its speeds count the samples of all ranks: the
    mean over ranks is right, a sum would count them once per rank. Other names and patterns than ``"*"`` stay.
    """
    given: Mapping[str, Any] = reduce if isinstance(reduce, Mapping) else {"*": reduce}
    if given.get("*") not in ("sum", "nansum"):
        return reduce
    named = {name: kind for name, kind in given.items() if name != "*"}
    means = {name: "mean" for name in ALREADY_REDUCED if name not in named}
    return {**named, **means, "*": given["*"]}


class _WithWandb(list[str]):
    """The places to which a Trainer reports, and wandb: found in it, but no item of it. Pickled as a list."""

    def __contains__(self, name: object) -> bool:
        return name == "wandb" or super().__contains__(name)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return list, ([*self],)


class _AsWandb:
    """Replaces the module wandb in the stock callback, with the run of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            return self._session.run
        if name in ("config", "summary", "define_metric", "watch", "log_artifact", "log", "finish"):
            return getattr(self._session, name)
        return getattr(dist_wandb, name)


integration_utils.INTEGRATION_TO_CALLBACK[NAME] = DistWandbCallback
