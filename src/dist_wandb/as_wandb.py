"""The functions of wandb's module that act on the current run, for ``import dist_wandb as wandb``.

``wandb.log``, ``wandb.config``, ``wandb.watch`` and so on act on the session that was opened last without
``reinit="create_new"``. On a rank without a run, they do what the session does there. If no session is open they are
wandb's own, for a run that was opened without this package; without such a run they raise `wandb.Error`, as wandb does.

All other names that a script uses are wandb's own (`runs.run_metadata`), looked up at each use. The lists are in
`dist_wandb.__init__`; `tests/unit/test_as_wandb.py` compares them with wandb's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.job.timed_caller import poll
from dist_wandb.runs import run_metadata
from dist_wandb.session import inherited_rank
from dist_wandb.session.job_description import ONE_AGENT, ask
from dist_wandb.session.registry import current, in_scope, open_sessions, opened_in
from dist_wandb.settings.options import DEFAULT_LIMITS

if TYPE_CHECKING:
    from dist_wandb.payloads.scalars import Weight
    from dist_wandb.session.session import Session

_OTHER_AGENTS = 5.0  # seconds in which rank 0 expects the other ranks to call `agent`, too, before it takes a trial


def log(
    data: Mapping[str, Any],
    step: int | None = None,
    commit: bool | None = None,
    sync: bool | None = None,  # noqa: ARG001  # wandb has ignored it for years
    *,
    weight: Weight = None,
) -> None:
    """Log one row with the current session: like `wandb.log`, with the same arguments, for the numbers of all ranks.

    Args:
        data: Values by name, as for `Session.log`.
        step: Position of the row on the x axis.
        commit: As in `wandb.Run.log`, for rows of a single rank.
        sync: Ignored, as in wandb.
        weight: Weight of the values in a mean over ranks, such as the number of samples behind them.

    Raises:
        wandb.Error: `init` was not called in this process.
        ConfigurationError: As `Session.log`.
    """
    session = current()
    if session is None:
        run_metadata.of_its_run("log", _why_not)(data, step=step, commit=commit)
    else:
        _of_session(session, "log")(data, step, commit=commit, weight=weight)


def finish(exit_code: int | None = None, quiet: bool | None = None) -> None:  # noqa: ARG001  # wandb ignores it, too
    """End the current session and, on a rank with a run, the run: `wandb.finish`. Has no effect without a session.

    Args:
        exit_code: Exit code of the job to show in W&B; `None` or 0 for success.
        quiet: Ignored, as in wandb.
    """
    running = run_metadata.running_run()
    ended: list[Session] = []
    if (session := current()) is not None:
        # A logger of Lightning's has its own session for the script's run. Only then the id is read, which may wait.
        others = [one for one in reversed(in_scope()) if one.is_current and one is not session]
        ended = [session, *(one for one in others if one.id in (None, session.id))]
    for one in ended:
        of_logger = {"others_go_on": True} if one.opened_at is None else {}  # other ranks may never call this
        one.finish(exit_code, **of_logger)
    # No session ends a run of wandb's own `init`; as for wandb, here it is the run to be ended. In a fork, it goes on.
    is_left = running is not None and running is run_metadata.running_run()
    if is_left and (not ended or any(one.run is running for one in ended if one not in open_sessions())):
        run_metadata.of_wandb("finish")(exit_code)


join = finish


def teardown(exit_code: int | None = None) -> None:
    """End all sessions, then wandb's own process: `wandb.teardown`, which drops rows that it has not got.

    Args:
        exit_code: Exit code of the job to show in W&B; `None` or 0 for success.
    """
    for session in open_sessions():
        session.finish(exit_code)
    run_metadata.of_wandb("teardown")(exit_code)


def restore(name: str, run_path: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Fetch a file of a run from W&B: `wandb.restore`. With `run_path`, also on a rank without a run.

    Args:
        name: Name of the file.
        run_path: The run, as ``ENTITY/PROJECT/ID``; the current one if `None`.
        args: Further positional arguments of `wandb.restore`.
        kwargs: Further keyword arguments of `wandb.restore`.

    Returns:
        The open file; for the current run, a stand-in on a rank that has none.
    """
    if (session := current()) is None or run_path is not None:
        return run_metadata.of_wandb("restore")(name, run_path, *args, **kwargs)
    return session.restore(name, run_path, *args, **kwargs)


def _of_session(session: Session, name: str) -> Callable[..., Any]:
    # As wandb's, not the function that a script has put in its place on the run, and that may call wandb's.
    function = getattr(type(session), name, None)
    return getattr(session.run, name) if function is None else partial(function, session)


def _acting(name: str) -> Callable[..., Any]:
    """Return a function that acts on the current session as wandb's function of this name does on the current run."""

    def act(*args: Any, **kwargs: Any) -> Any:
        session = current()
        function = run_metadata.of_its_run(name, _why_not) if session is None else _of_session(session, name)
        return function(*args, **kwargs)

    act.__name__ = act.__qualname__ = name
    act.__doc__ = f"`wandb.{name}` for the current session; on a rank without a run it has no effect."
    return act


for _name in (
    *("alert", "define_metric", "link_model", "log_artifact", "log_model", "mark_preempting", "pin_config_keys"),
    *("save", "unwatch", "use_artifact", "use_model", "watch"),
):
    globals()[_name] = _acting(_name)


def agent(
    sweep_id: str,
    function: Callable[..., Any] | None = None,
    entity: str | None = None,
    project: str | None = None,
    count: int | None = None,
    **others: Any,
) -> Any:
    """Start an agent of a sweep: `wandb.agent`, with the same arguments. Refused on several ranks of a job.

    Args:
        sweep_id: Id of the sweep.
        function: Called for each trial; if `None`, the agent starts the sweep's program.
        entity: Owner of the sweep.
        project: Project of the sweep.
        count: Number of trials.
        others: Further arguments of later versions of wandb.

    Raises:
        ConfigurationError: Another rank of this job starts an agent, too.
    """
    _refuse_several_agents()
    return run_metadata.of_wandb("agent")(
        sweep_id, function=function, entity=entity, project=project, count=count, **others
    )


def _refuse_several_agents() -> None:
    topology = inherited_rank.detect_or_none()
    if topology is None or topology.world_size == 1:
        return
    try:
        store = JobStore.find("dist_wandb.agent", topology, DEFAULT_LIMITS.join_timeout)
    except RendezvousError:  # `init` raises it
        return
    rank, called = topology.global_rank, "called"
    if topology.is_coordinator:
        wait = lambda store: poll(lambda: store.has([called]) or None, _OTHER_AGENTS, LONGEST_PAUSE)  # noqa: E731
        if not ask(store, wait, None, 2 * _OTHER_AGENTS):
            return
    else:
        ask(store, lambda store: store.publish(called, rank), None)
    raise ConfigurationError(
        f"wandb.agent was called on rank {rank} of {topology.world_size}, and on other ranks as well. {ONE_AGENT}"
    )


def of_current(name: str) -> Any:
    """Return ``wandb.run``, ``wandb.config`` or ``wandb.summary``: the current session, its config, or its summary.

    If no session is open, it is wandb's own object: while wandb has no run, that is `None` for the run, and otherwise
    an object that raises `wandb.Error` when used.
    """
    if (session := current()) is not None:
        return session if name == "run" else getattr(session, name)
    return None if name == "run" and not run_metadata.running_run() else run_metadata.of_wandb(name)


def _why_not() -> str:
    if open_sessions():
        return (
            "All open runs were opened with reinit='create_new', which leaves wandb.run alone. Use what init returned."
        )
    if opened_in:
        return "The session of dist_wandb has been finished."
    topology = inherited_rank.detect_or_none()
    if topology is None:
        return "No session of dist_wandb is open in this process."
    if topology.world_size == 1:
        return "No session of dist_wandb is open."
    return (
        f"No session of dist_wandb is open on rank {topology.global_rank} of {topology.world_size}. Call init on every "
        "rank, or call log under the same condition as init."
    )
