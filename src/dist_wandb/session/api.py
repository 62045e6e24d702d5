"""What a script calls: `init` and `get_run`.

`init` first finishes the session that it opened earlier at the same call site, with the same call stack (`CallSite`),
in the same thread and task. In IPython it finishes all sessions that it opened. It never finishes sessions in a
``with`` block or of decorated functions, and none if `reinit` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import DistWandbError
from dist_wandb.notices import Notices
from dist_wandb.runs import argument_checks, requested
from dist_wandb.runs.null_run import NullRun
from dist_wandb.session.call_site import CallSite, is_notebook
from dist_wandb.session.opener import open_session
from dist_wandb.session.registry import current, history, is_nested_on_purpose, open_sessions
from dist_wandb.settings.limits import DEFAULT_LIMITS, Limits
from dist_wandb.settings.options import (
    OPTION_NAMES,
    ConfigSyncMode,
    Options,
    SystemMetrics,
    around,
)
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from dist_wandb.session.session import Session
    from dist_wandb.settings.plan import RankScope, RunMode
    from dist_wandb.settings.reduction import PerRank, Reduce, Spread
    from dist_wandb.topology.units import UnitArgument

_log = logging.getLogger("dist_wandb")

_OF_ONE_RUN = ("id", "name", "notes", "config", "resume", "resume_from", "fork_from")
_notices = Notices()


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
    **wandb_init: Any,
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
        **wandb_init: Further arguments of `wandb.init`. An `id` or `group` replaces the generated one in the ids and
            groups of all runs of the job. With ``resume="auto"``, the runs of the last start in this directory are
            continued, unless it ended successfully; with ``"never"``, none are, even if a launcher restarts the job.
            Without `reinit`, an open run is finished first if this call opened it (in a loop, say), or in a notebook;
            runs in a ``with`` block or a decorated function are nested instead.

    Returns:
        The session of this rank, with `log`, `flush`, `finish`, `run`, `plan`, `topology`, `id`, `url` and `config`.

    Raises:
        ConfigurationError: An argument is not supported, or ``config_sync="check"`` found different configs.
        TopologyError: This process's rank is unknown, or the launcher's variables contradict each other.
        RendezvousError: The ranks could not agree on a run id within `join_timeout`.

    Note:
        With ``run_mode="shared"``, a `WANDB_SERVICE` inherited from another process is removed from this process's
        environment, because one wandb process refuses two writers of one run.

        While a session is open, SIGTERM ends its run with exit code 143 before it ends the process, unless the process
        has its own handler. Calls of `log`, `define_metric` and `finish` on the run, also through ``wandb.log`` and so
        on, go to the session first (see `log`). All of this is undone at the end. Nothing else is changed.

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
    arguments = {**_wandb_arguments(around()), **wandb_init}
    if project is not None:
        arguments["project"] = project
    call_site = CallSite.current()
    if not (is_nested_on_purpose() or requested.sets_reinit(arguments)):
        _finish_earlier(call_site)
    session = open_session(options, arguments, integration="dist_wandb.init")
    session.opened_at = call_site
    return session


def _finish_earlier(call_site: CallSite) -> None:
    """Finish sessions that a loop or a notebook cell opened and is about to open again; wandb does so in notebooks."""
    in_notebook = is_notebook()
    for session in reversed(open_sessions()):
        if session.may_end_before(call_site, in_notebook=in_notebook):
            session.finish()


def check_init(given: Mapping[str, Any]) -> None:
    """Check arguments of `init` without opening anything.

    Args:
        given: Arguments by name.

    Raises:
        ConfigurationError: An argument is not supported.
    """
    Options.among(given)
    argument_checks.check_init_arguments(
        {name: value for name, value in given.items() if name not in OPTION_NAMES}, "wandb_init"
    )


def _wandb_arguments(around: Mapping[str, Any]) -> dict[str, Any]:
    """The enclosing decorator's arguments for W&B, without those that identify one run: further runs share them."""
    return {name: value for name, value in around.items() if name not in OPTION_NAMES and name not in _OF_ONE_RUN}


def get_run() -> Session | NullRun:
    """Return the session that was opened last in this process and is not finished; a `NullRun` if there is none.

    Inside a function decorated with `wandb_init`, only sessions of that call count: concurrent calls, in threads or
    asyncio tasks, each have their own.

    Returns:
        The object that `init` returned, so ``get_run().log(...)`` works on every rank. It is truthy on all ranks of a
        job, also on ranks without a run; the `NullRun` is falsy.
    """
    return current() or _NoSession()


class _NoSession(NullRun):
    """Returned by `get_run` if no session is open."""

    def log(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing; warn once, on the coordinator, if no session was ever opened in this process."""
        if not history.has_begun and _is_coordinator():
            _notices.warn(
                "no session",
                "dist_wandb.get_run().log was called, but no session was opened in this process, so nothing is logged. "
                "Call dist_wandb.init() first, on every rank, or decorate the function with dist_wandb.wandb_init.",
            )


def _is_coordinator() -> bool:
    try:
        return Topology.detect().is_coordinator
    except DistWandbError:  # `init` raises it
        return True
