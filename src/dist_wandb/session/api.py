"""What a script calls: `init` and `get_run`.

While a session is open, `init` does what wandb does while a run is open (`reinit`): by default it returns that session
or, in a notebook, finishes all sessions first. The session of a decorated function is opened in any case, and finished
only by its function or by ``reinit="finish_previous"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dist_wandb import errors
from dist_wandb.job.topology import Topology
from dist_wandb.job.units import UnitArgument
from dist_wandb.notices import Notices, users_line
from dist_wandb.runs import requested
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.requested import WandbArguments
from dist_wandb.session import inherited_rank
from dist_wandb.session.job_description import NextJob, next_job, take
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import (
    in_scope,
    is_in_ipython,
    is_nested_on_purpose,
    open_sessions,
    opened_in,
    outer_session,
)
from dist_wandb.session.session import Session
from dist_wandb.session.stalls.verdict import Stall
from dist_wandb.settings.options import (
    DEFAULT_LIMITS,
    OPTION_NAMES,
    ConfigSyncMode,
    Limits,
    Options,
    StallTimeout,
    SystemMetrics,
    outer_arguments,
)
from dist_wandb.settings.plan import RankScope, RunMode
from dist_wandb.settings.reduction import PerRank, Reduce, Spread

if TYPE_CHECKING:
    from typing_extensions import Unpack


INIT = "dist_wandb.init"
_MOMENT = 2.0  # seconds that an integration waits for rank 0 to open a session
_BESIDE = "dist_wandb.init-beside"  # with reinit="create_new": counted separately, as perhaps only one rank opens them
_OF_ONE_RUN = (*OPTION_NAMES, "id", "name", "notes", "config", "reinit", "resume", "resume_from", "fork_from")
_notices = Notices()


class InitArguments(WandbArguments, total=False):
    """Arguments of `init`, for editors and type checkers."""

    project: str | None
    run_mode: RunMode | None
    rank_scope: RankScope | None
    reduce: Reduce
    spread: Spread
    per_rank: PerRank
    limits: Limits | Mapping[str, float]
    config_sync: ConfigSyncMode
    system_metrics: SystemMetrics
    strict: bool
    unit: UnitArgument
    primary_rank: int | None
    stall_timeout: StallTimeout
    on_stall: Callable[[Stall], object] | None


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
    unit: UnitArgument = None,
    primary_rank: int | None = None,
    stall_timeout: StallTimeout = "auto",
    on_stall: Callable[[Stall], object] | None = None,
    **wandb_init: Unpack[WandbArguments],
) -> Session:
    """Open the W&B runs of a distributed job. Call it on every rank. Also works as a context manager.

    Args:
        project: Name of the W&B project.
        run_mode: `"auto"`: one run per unit, opened by its first rank. `"shared"`: one run that all ranks of the unit
            write into. `"new"`: one run per rank, grouped. `None`: the value given to an enclosing `wandb_init`
            decorator, else `DIST_WANDB_RUN_MODE`, else `"auto"`.
        rank_scope: `"global"`: all ranks are one unit. `"worker"`: the ranks of each node are a unit. `None`: as for
            `run_mode`, with `DIST_WANDB_RANK_SCOPE`, else `"global"`.
        reduce: How the ranks' numbers become one: `"mean"`, `"sum"`, `"min"`, `"max"`, `"first"`, `"nanmean"` or
            `"nansum"` (which skip ranks with NaN); a mapping of name patterns to these, of which the first match
            counts; or `None` for no reduction: the primary then writes its own numbers. `"auto"` is `"mean"`, but
            `None` with ``run_mode="new"``. A rank that logs `None` for a name does not contribute to it.
        spread: Also write the spread over ranks (``NAME/min``, ``NAME/max``, ``NAME/std``, ``NAME/argmax_rank``), of
            all names or of those that match the given patterns. The standard deviation has the weights of the mean m:
            sqrt(sum(w * (x - m)**2) / sum(w)).
        per_rank: In a shared run, which names each rank also writes under its label (``rank-3/loss``, and media of
            ranks other than the primary), with or without a reduction: `"auto"` for all except numbers that are equal
            on all ranks by nature, `True` for all, `False` for none, or patterns. Equal by nature are counters and
            schedules: `epoch`, `iter`, `iteration`, `step`, `global_step`, `tokens`, `lr`, `lr-*` and `learning_rate`,
            also after a slash (`trainer/global_step`).
        limits: How long to wait for other ranks and for W&B, in seconds: a `dist_wandb.Limits`, or a mapping of its
            arguments.
        config_sync: What to do if ranks pass different values for a name in `config`: `"warn"` once; `"check"`: raise
            an error on all ranks, after waiting up to `join_timeout` for them; `"off"`: nothing. The primary's values
            apply in any case. With ``run_mode="new"`` each rank keeps its own, and only `"check"` reports differences.
            Names that differ by nature, such as ``local_rank``, ``gpu`` and ``device``, are not compared.
        system_metrics: With ``run_mode="auto"``: record the hardware of the primary's node (`"primary"`) or of all
            nodes (`"all-nodes"`).
        strict: Whether to raise an error if W&B cannot open a run. Otherwise it is written to disk, with a warning.
        unit: The ranks whose numbers belong together, if not all: a `ProcessGroup`, a `DeviceMesh` or a dimension of
            one (``mesh["dp"]``), or a list of global ranks. Pass on each rank the group that it is in; the group that
            contains the primary is used. Ranks outside it, which hold other parts of the same replicas of the model,
            open no run, and what they log is not written. In `DistWandbLogger` and `DistWandbTracker` it may be the
            name of a dimension of the framework's mesh, and copies are left out by default: it is ``"data_parallel"``
            with `ModelParallelStrategy`, and all dimensions of a `ParallelismConfig` except ``"tp"``.
        primary_rank: Global rank of the primary, the same on all ranks. Default: 0. -1 is the last rank, for example if
            the last stage of a pipeline has the loss.
        stall_timeout: After how many seconds without a sign of any rank (a call of the session, a collective) a message
            says which rank stands where: ``docs/stalls.md``. `"auto"`: the larger of 300 s and ten times the longest
            pause so far, at most a minute before PyTorch's own timeout. `None`: never.
        on_stall: A function that is called, on a thread of the rank that tells it, with the same as data.
        **wandb_init: Further arguments of `wandb.init`. An `id` or `group` replaces the generated one in the ids and
            groups of all runs of the job. With ``resume="auto"``, the runs of the last start in this directory are
            continued, unless it ended successfully; with ``"never"``, none are, even if a launcher restarts the job.
            While a run is open, `reinit` applies as in wandb. By default `init` returns the open run and ignores the
            other arguments; in a notebook, it finishes all runs of this process first. ``"create_new"`` leaves
            ``wandb.run`` alone. A decorated function opens its run in any case.

    On a rank without a run, the names of wandb's module (``wandb.run``, `init`, `log`, ...) act on the session until it
    ends, as they do on the rank with the run.

    Returns:
        The session of this rank, with `log`, `flush`, `finish`, `run`, `plan`, `topology`, `id`, `url` and `config`.

    Raises:
        ConfigurationError: An argument is not supported, or ``config_sync="check"`` found different configs.
        wandb.Error: A run is open, and ``resume="must"`` or its `id` asks for one that cannot be opened beside it.
        TopologyError: This process's rank is unknown, or the launcher's variables contradict each other.
        RendezvousError: The ranks could not agree on a run id within `join_timeout`.

    Note:
        With ``run_mode="shared"``, a `WANDB_SERVICE` inherited from another process is removed from this process's
        environment, because one wandb process refuses two writers of one run.

        While a session is open, SIGTERM ends its run with exit code 143 before it ends the process, unless the process
        has its own handler. Calls of `log`, `define_metric` and `finish` on the run, also through ``wandb.log`` and so
        on, go to the session first (see `log`). All of this is undone at the end. As with wandb, `sys.exit` stays
        replaced by a function that notes its argument, the exit code of the run. Nothing else is changed.

        The x axis of all metrics is `global_step`, unless `define_metric` of the run sets another.

        While the job runs, rank 0 keeps a restart record of a few hundred bytes in ``DIR/wandb/dist-wandb-resume``.
        After a restart by torchrun or SLURM it is used to continue the same runs; rows without a step follow those of
        the run.

    Example:
        Two processes under torchrun::

            with dist_wandb.init(project="digits", run_mode="auto") as run:
                run.log({"loss": 0.4}, step=1)  # on rank 0
                run.log({"loss": 0.6}, step=1)  # on rank 1, which has no run; rank 0 writes one row, loss=0.5
    """
    options = Options.among(locals())
    given = {key: one for key, one in outer_arguments().items() if key not in _OF_ONE_RUN}
    arguments: dict[str, Any] = given | wandb_init
    if project is not None:
        arguments["project"] = project
    requested.check_init_arguments(arguments, INIT)
    if (again := while_open(arguments)) is not None:
        return again
    integration = _BESIDE if requested.reinit(arguments) == "create_new" else INIT
    session = open_session(options, arguments, integration=integration)
    session.opened_at = users_line()
    return session


def while_open(arguments: Mapping[str, Any], caller: str = "init") -> Session | None:
    """Do with the open sessions what `reinit` says. Return the session that the `caller` gets, if it opens none."""
    open_now, reinit = open_sessions(), requested.reinit(arguments)
    if not open_now:
        return None
    # wandb then leaves open runs alone; on a rank without a run, the mode means nothing
    is_disabled = any(session.run for session in open_now) and requested.mode(arguments) == "disabled"
    if reinit == "create_new":
        run_id = requested.run_id(arguments)
        if run_id is not None and any(run_id in (session.plan.base_id, session.id) for session in open_now):
            raise errors.Error(
                f"run ID {run_id} is in use: that run is open in this process. Finish it first, or pass another id."
            )
        return None
    if reinit == "default" and is_nested_on_purpose():
        return None
    if reinit == "finish_previous" or (reinit == "default" and is_in_ipython()):
        function = outer_session() if reinit == "default" else None
        for earlier in open_now:
            if not is_disabled and function in (None, earlier.opened_inside):
                earlier.finish()
        return None
    if requested.resume(arguments) == "must" and not is_disabled:
        raise errors.Error(
            "Cannot resume a run while another run is open. Finish that run first, or pass reinit='create_new'."
        )
    line = users_line()
    return next((one for one in reversed(in_scope()) if one.is_returned(line, caller, disabled=is_disabled)), None)


def join_init(options: Options, topology: Topology, integration: str) -> Session | None:
    """Open this rank's part of the session that rank 0 has opened by `init`, under a guard; `None` if there is none.

    The integration uses that session on rank 0; here it would open, and at last write, another run. Waits a moment for
    rank 0 to open one or the other.
    """
    if topology.led_by(options.primary_rank).is_coordinator:
        return None
    limit, found = options.limits.join_timeout, None
    with suppress(errors.RendezvousError):
        found = next_job((integration, INIT), topology, limit, min(_MOMENT, limit))
    return None if found is None or found.integration == integration else opened_as(found, options, topology)


def opened_as(found: NextJob, options: Options, topology: Topology) -> Session:
    """Open this rank's part of a session that rank 0 has opened by `init`."""
    theirs, arguments = found.options(options), found.job["arguments"]
    return open_session(theirs, arguments, integration=INIT, topology=topology, number=take(found))


def check_init(given: Mapping[str, Any]) -> None:
    """Check arguments of `init` without opening anything; raise `ConfigurationError` for one that is not supported."""
    Options.among(given)
    requested.check_init_arguments(  # its config may be a file that is written before the first call
        {name: value for name, value in given.items() if name not in (*OPTION_NAMES, "config")}, "wandb_init"
    )


def get_run() -> Session | NullRun:
    """Return the session that was opened last in this process and is not finished; a `NullRun` if there is none.

    Inside a function decorated with `wandb_init`, only sessions of that call count: concurrent calls, in threads or
    asyncio tasks, each have their own.

    Returns:
        The object that `init` returned, so ``get_run().log(...)`` works on every rank. It is truthy on all ranks of a
        job, also on ranks without a run; the `NullRun` is falsy.
    """
    return next(reversed(in_scope()), None) or _NoSession()


class _NoSession(NullRun):
    """Returned by `get_run` if no session is open."""

    def log(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing; warn once, on the coordinator, if no session was ever opened in this process."""
        if opened_in or _notices.has("no session"):
            return
        topology = inherited_rank.detect_or_none()
        if topology is None or topology.is_coordinator:
            _notices.warn(
                "no session",
                "dist_wandb.get_run().log was called, but no session was opened in this process, so nothing is logged. "
                "Call dist_wandb.init() first, on every rank, or decorate the function with dist_wandb.wandb_init.",
            )
