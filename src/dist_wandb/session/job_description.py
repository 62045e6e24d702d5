"""What the ranks of a job publish before they open their runs: the session, its options and arguments.

The coordinator publishes its options and describing arguments (name, tags, config, ...). A rank that reads them is
refused if its mode or scope differs; in `auto`, ranks without a run do not read them. Ranks that were given no
arguments use the coordinator's. Secondaries of a shared run always do, because W&B keeps what any writer sent last.

`check_trial` finds, when a run is opened, that ranks were given different trials of a sweep, by agents of their own:
before a rank opens its run, and again after that, because the first rank cannot know what later ones were given; of one
that comes later still, it learns at its end. None waits for ranks that may never come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

from dist_wandb.errors import ConfigurationError
from dist_wandb.job import leftovers
from dist_wandb.job.job_identity import refuse
from dist_wandb.job.job_store import LONGEST_PAUSE, JobStore, not_of_a_rank
from dist_wandb.job.timed_caller import STORE_PATIENCE, call_or_default, poll
from dist_wandb.job.topology import Topology
from dist_wandb.runs import run_metadata, sweeps
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import RunPlan, plan_run

_T = TypeVar("_T")
_JOB = "job"  # the key of the coordinator's message
_EQUAL = ("run_mode", "rank_scope")  # options that must be the same on all ranks
_opened: Counter[str] = Counter()  # sessions by integration
_behind: set[str] = set()  # integrations of which a session has ended without this rank
_OTHER = "trial/other"  # key of the trial of a sweep that is not that of the first rank
ONE_AGENT = (
    "Every rank would take trials of its own from the sweep, and only those of one rank would be trained. Start one "
    "agent that starts the job: in the sweep's configuration set command: [${env}, torchrun, --nproc-per-node, N, "
    "train.py, ${args}], call init in train.py without an agent, and run: wandb agent SWEEP."
)


class JobDescription(TypedDict):
    """The coordinator's message about the session that it opens."""

    options: dict[str, Any]
    arguments: dict[str, Any]  # those of `wandb.init` that describe the run


class NextJob(NamedTuple):
    """A session of the coordinator that this rank has not opened."""

    integration: str
    number: int  # of the session among the integration's
    job: JobDescription

    def options(self, own: Options) -> Options:
        """Return the coordinator's options, with this rank's `on_stall`, which is not published."""
        return replace(own, **{**self.job["options"], "on_stall": own.on_stall})


def ask(store: JobStore | None, read: Callable[[JobStore], _T], otherwise: _T, within: float = STORE_PATIENCE) -> _T:
    """Read from the store; `otherwise` if there is none, or it does not answer within some seconds."""
    return otherwise if store is None else call_or_default(lambda: read(store), otherwise, within)


def name_and_store(
    options: Options, topology: Topology, integration: str, number: int | None, *, store_answers: bool = True
) -> tuple[str, JobStore | None]:
    """Return the session's name, equal on all ranks, and its keys in the job's store, if any; counts the sessions.

    Those of a process that meets no others are counted apart: other ranks may have none.
    """
    is_alone = topology.world_size == 1 or topology.is_unconnected
    if number is None:
        counted = f"{integration}, alone" if is_alone else integration
        _opened[counted] += 1
        number = _opened[counted]
    name = f"{integration}/{number}"
    store = None if is_alone or not store_answers else JobStore.find(name, topology, options.limits.join_timeout)
    if store is not None:
        leftovers.delete_stale_keys(store, topology.world_size)
    return name, store


def plan_of(topology: Topology, options: Options, base_id: str | None, group: str | None) -> RunPlan:
    mode, scope, unit = options.run_mode, options.rank_scope, options.unit_ranks
    all_nodes = options.system_metrics == "all-nodes"
    in_sweep = sweeps.is_trial()
    return plan_run(topology, mode, scope, base_id, group=group, all_nodes=all_nodes, unit=unit, in_sweep=in_sweep)


def needs_base_id(topology: Topology, options: Options) -> bool:
    return plan_of(topology, options, "not known yet", None).needs_base_id


def publish(options: Options, store: JobStore, init_arguments: Mapping[str, Any]) -> None:
    arguments = run_metadata.arguments_for_others(init_arguments)
    store.publish(_JOB, JobDescription(options=asdict(replace(options, on_stall=None)), arguments=arguments))


def is_published(store: JobStore) -> bool:
    return store.has([_JOB])


def complete(
    options: Options, topology: Topology, store: JobStore | None, init_arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of `wandb.init`, completed with the coordinator's, which the coordinator publishes here.

    Raises `ConfigurationError` if the coordinator opens another kind of run, and `RendezvousError` if it did not
    publish them within `join_timeout`.
    """
    if store is None:
        return init_arguments
    if topology.is_coordinator:
        publish(options, store, init_arguments)
        return init_arguments
    if not needs_base_id(topology, options):
        return init_arguments
    described = _checked(store.wait_get(_JOB, f"rank {topology.coordinator}"), topology)
    mine, theirs = ({name: given.get(name) for name in _EQUAL} for given in (vars(options), described["options"]))
    if mine != theirs:
        raise ConfigurationError(
            f"Rank {topology.global_rank} opens its run with {mine}, but rank {topology.coordinator} with {theirs}. "
            "Give all ranks the same mode and scope, and open the same runs in the same order on all of them."
        )
    own = {name: value for name, value in init_arguments.items() if value is not None}
    given: dict[str, Any] = run_metadata.with_own_secrets(described["arguments"], init_arguments)
    if options.run_mode == "shared" or (options.run_mode == "auto" and options.system_metrics == "all-nodes"):
        # every writer sends the describing arguments, and W&B keeps the last ones
        local: dict[str, Any] = {name: own[name] for name in ("dir", "mode") if name in own}
        own.pop("config", None)
        return {**own, **given, **local}
    return {**given, **own}


def _checked(message: object, topology: Topology) -> JobDescription:
    """Check a message from the store, to which others may write, too."""
    if isinstance(message, dict) and all(isinstance(message.get(name), dict) for name in ("options", "arguments")):
        return cast("JobDescription", message)
    raise not_of_a_rank("description of the job", message, topology)


def next_job(
    integrations: Sequence[str], topology: Topology, timeout: float, within: float = 0.0, *, has_rows: bool = False
) -> NextJob | None:
    """Return the coordinator's next session of one of the integrations, which this rank has not opened.

    Returns `None` if the coordinator has opened none of the sessions `within` seconds, or there is no store. Sessions
    that the coordinator has already finished are skipped, as this rank had no part in them, unless it `has_rows` for a
    run of its own: with rows, a rank that is behind (with the first integration) does not wait. Raises
    `RendezvousError` if the store does not answer for `timeout` seconds, or holds another message.
    """
    stores = {name: _next_store(name, topology, timeout, has_rows=has_rows) for name in integrations}

    def published() -> NextJob | None:
        for name, (number, store) in stores.items():
            message = None if store is None else store.try_get(_JOB)
            if message is not None:
                return NextJob(name, number, _checked(message, topology))
        return None

    is_in_vain = (has_rows and integrations[0] in _behind) or any(store is None for _, store in stores.values())
    return poll(published, 0.0 if is_in_vain else within, LONGEST_PAUSE)


def _next_store(integration: str, topology: Topology, timeout: float, *, has_rows: bool) -> tuple[int, JobStore | None]:
    """Return the number and the keys of the integration's next session in which this rank can still take part."""
    while True:
        number = _opened[integration] + 1
        store = JobStore.find(f"{integration}/{number}", topology, timeout)
        if store is None or not leftovers.is_over(store):
            return number, store
        job = store.try_get(_JOB) if has_rows else None
        if job is not None and _checked(job, topology)["options"].get("run_mode") != "auto":
            return number, store
        _opened[integration] = max(_opened[integration], number)  # another thread may count, too
        _behind.add(integration)


def take(found: NextJob) -> int:
    """Count a session as the last one that this rank has opened; return its number, for `open_session`."""
    _opened[found.integration] = max(_opened[found.integration], found.number)
    return found.number


def miss_job(integration: str) -> None:
    """Count a session that this rank ends without having opened it, so that its next one is the coordinator's next."""
    if integration not in _behind:
        _opened[integration] += 1


def fall_behind(integration: str) -> None:
    """Note that the coordinator has ended a session before this rank, which waits for no further one at its end."""
    _behind.add(integration)


def check_trial(store: JobStore | None, topology: Topology) -> None:
    """Refuse, by a `ConfigurationError`, to open the run of one trial with ranks that were given another trial."""
    trial = sweeps.trial_id()
    if store is None or trial is None:
        return
    mine = {"id": trial, "rank": topology.global_rank}
    first = store.claim("trial", mine)
    if isinstance(first, dict) and first.get("id") != trial:
        store.publish(_OTHER, mine)
    for other in (first, store.try_get(_OTHER)):
        if isinstance(other, dict) and other.get("id") != trial:
            error = _different(topology, trial, other)
            refuse(store, topology, str(error))
            raise error


def late_trial(store: JobStore | None, topology: Topology) -> ConfigurationError | None:
    """Return the error that another rank came with another trial of a sweep, after `check_trial` on this one."""
    asked = store if sweeps.is_trial() else None
    found: dict[str, Any] = ask(asked, lambda store: store.get_present(["trial", _OTHER]), {})
    first, other = found.get("trial"), found.get(_OTHER)
    if not isinstance(first, dict) or not isinstance(other, dict) or other.get("rank") == topology.global_rank:
        return None
    return _different(topology, first.get("id"), other)


def _different(topology: Topology, trial: object, other: dict[str, Any]) -> ConfigurationError:
    return ConfigurationError(
        f"Rank {topology.global_rank} was given the trial {trial!r} of the sweep, but rank {other.get('rank')} the "
        f"trial {other.get('id')!r} (WANDB_RUN_ID), by agents of their own. {ONE_AGENT}"
    )
