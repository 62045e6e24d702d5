"""What a script calls: `init` and `get_run`.

*Opened again.* `init` finishes the session that it has opened at the same call site, with the same calls around it
(`CallSite`), in the same thread and task, and, in IPython, any that it has opened; not those in a ``with`` block or
of decorated functions, and none where `reinit` is given.
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
    """Open the W&B runs of a distributed job. Call it on every rank; it is a context manager too.

    Args:
        project: Name of the W&B project.
        run_mode: `"auto"`: one run for the unit, opened by its first rank. `"shared"`: one run that all ranks of the
            unit write into. `"new"`: one run per rank, grouped. `None`: what the decorator `wandb_init` around was
            given, else that of the variable `DIST_WANDB_RUN_MODE`, else `"auto"`.
        rank_scope: `"global"`: all ranks are one unit. `"worker"`: the ranks of each node are. `None`: likewise, with
            `DIST_WANDB_RANK_SCOPE`; else `"global"`.
        reduce: How one number comes from the ranks' numbers: `"mean"`, `"sum"`, `"min"`, `"max"`, `"first"`,
            `"nanmean"` and `"nansum"`, in which ranks with NaN have no part, a mapping of name patterns to those, of
            which the first that matches counts, or `None` for no reduction: then the primary writes its own numbers.
            `"auto"` is `"mean"`, but `None` with ``run_mode="new"``. A rank that logs `None` has no part either.
        spread: Also write the spread over ranks (``NAME/min``, ``NAME/max``, ``NAME/std``, ``NAME/argmax_rank``), of
            all names or of those that match the patterns. The standard deviation is weighted as the mean m is:
            sqrt(sum(w * (x - m)**2) / sum(w)).
        per_rank: In a shared run, which names each rank also writes under its label (``rank-3/loss``, and media of
            ranks other than the primary), with or without a reduction: `"auto"` for all but numbers that are equal on
            all ranks by nature, `True` for all, `False` for none, or patterns. Equal by nature are counters and
            schedules: `epoch`, `iter`, `iteration`, `step`, `global_step`, `tokens`, `lr`, `lr-*` and `learning_rate`,
            also behind a slash (`trainer/global_step`).
        limits: How long to wait for other ranks and for W&B, in seconds: `dist_wandb.Limits`, or a mapping of its
            arguments.
        config_sync: What to do about ranks that pass different values for a name in `config`: `"warn"` once, raise an
            error on all ranks (`"check"`, which waits for them up to `join_timeout`), or nothing (`"off"`). In any case
            the primary's values hold; with ``run_mode="new"``, where each rank keeps its own, only `"check"` objects.
            Names such as ``local_rank``, ``gpu`` and ``device`` are not compared, as they differ by nature.
        system_metrics: With ``run_mode="auto"``: record the hardware of the primary's node (`"primary"`) or of all
            nodes (`"all-nodes"`).
        strict: Whether a run that W&B cannot open is an error. Otherwise it is written to disk, with a warning.
        unit: The ranks whose numbers belong together, where those are not all: a `ProcessGroup`, a `DeviceMesh` or a
            dimension of one (``mesh["dp"]``), or a list of global ranks. Pass on each rank the group that it is in: the
            one with the primary counts. Ranks outside of it, which hold other parts of the same replicas of the model,
            open no run, and what they log is not written. In `DistWandbLogger` and `DistWandbTracker` it may be the
            name of a dimension of the framework's mesh, and by itself it leaves out copies: it is ``"data_parallel"``
            with `ModelParallelStrategy`, and covers all dimensions of a `ParallelismConfig` but ``"tp"``.
        primary_rank: Global rank of the primary, the same on all ranks: 0 by default, -1 for the last one, as where the
            last stage of a pipeline has the loss.
        **wandb_init: Further arguments of `wandb.init`. An `id` or `group` replaces the generated one in the ids and
            groups of all runs of the job. With ``resume="auto"`` the runs of the last start in this directory are
            continued, unless it ended well; with ``"never"`` not even those of a job that its launcher restarts.
            Without `reinit`, a run that is open already is finished before, if this call (in a loop, say) has opened
            it, or in a notebook; but not in a ``with`` block or a decorated function, where runs are nested.

    Returns:
        The session of this rank, with `log`, `flush`, `finish`, `run`, `plan`, `topology`, `id`, `url` and `config`.

    Raises:
        ConfigurationError: An argument that cannot be honoured, or ``config_sync="check"`` and different configs.
        TopologyError: This process's rank is unknown, or the launcher's variables contradict each other.
        RendezvousError: The ranks could not agree on a run id within `join_timeout`.

    Note:
        With ``run_mode="shared"``, a `WANDB_SERVICE` that this process inherited from another is removed from its
        environment: one wandb process refuses two writers of one run.

        While a session is open, SIGTERM ends its run with exit code 143 before it ends the process, unless the process
        handles that signal itself. Calls of `log`, `define_metric` and `finish` of the run, also by ``wandb.log`` and
        its like, come to the session first (see `log`). At the end all is as it was. Nothing else is changed.

        The x axis of all metrics is `global_step`, unless `define_metric` of the run sets another.

        While the job runs, rank 0 keeps a restart record of a few hundred bytes in ``DIR/wandb/dist-wandb-resume``. A
        restart by torchrun or SLURM continues the same runs by it; rows without a step go on behind those of the run.

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
    """Finish what a loop, or a notebook's cell, has opened and is about to open again; as wandb does in notebooks."""
    in_notebook = is_notebook()
    for session in reversed(open_sessions()):
        if session.may_end_before(call_site, in_notebook=in_notebook):
            session.finish()


def check_init(given: Mapping[str, Any]) -> None:
    """Check arguments of `init` without opening anything.

    Args:
        given: Arguments by name.

    Raises:
        ConfigurationError: An argument that cannot be honoured.
    """
    Options.among(given)
    argument_checks.check_init_arguments(
        {name: value for name, value in given.items() if name not in OPTION_NAMES}, "wandb_init"
    )


def _wandb_arguments(around: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of the decorator around, those that further runs share: all of W&B's that name no one run."""
    return {name: value for name, value in around.items() if name not in OPTION_NAMES and name not in _OF_ONE_RUN}


def get_run() -> Session | NullRun:
    """The session that was opened last in this process and is not finished; a `NullRun` if there is none.

    Inside a function that `wandb_init` decorates, it is the last one of that call: calls that run at the same time, in
    threads or in tasks of asyncio, each have their own.

    Returns:
        What `init` returned, so that ``get_run().log(...)`` counts on every rank. It is truthy on all ranks of a job,
        also on those that open no run; the `NullRun` is falsy.
    """
    return current() or _NoSession()


class _NoSession(NullRun):
    """What there is where no session is open."""

    def log(self, *_args: Any, **_kwargs: Any) -> None:
        """Log nothing; warn once, on the coordinator, if nobody has ever opened a session here."""
        if not history.has_begun and _is_coordinator():
            _notices.warn(
                "no session",
                "dist_wandb.get_run().log was called, but no session was opened in this process, so nothing is logged. "
                "Call dist_wandb.init() before, on every rank, or decorate the function with dist_wandb.wandb_init.",
            )


def _is_coordinator() -> bool:
    try:
        return Topology.detect().is_coordinator
    except DistWandbError:  # its error is for who opens a session
        return True
