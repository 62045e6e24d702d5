"""One agent of a sweep for each job: an agent in every rank takes a trial for each rank, of which one is trained.

`agent` refuses to start on several ranks. `check_trial` finds, when a run is opened, that ranks were given different
trials by agents which were started in another way: before a rank opens its run, and again after that, because the first
rank cannot know what later ones were given; of one that comes later still, it learns at its end. None waits for ranks
that may never come, except that rank 0 waits for a few seconds before its agent takes the first trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.job_identity import refuse
from dist_wandb.job.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.job.timed_caller import briefly, poll
from dist_wandb.runs import run_metadata, sweeps
from dist_wandb.session import inherited_rank
from dist_wandb.settings.options import DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dist_wandb.job.model import Topology

_NAME = "dist_wandb.agent"  # of the keys in the job's store
_OTHER = "trial/other"  # key of the trial that is not that of the first rank
_OTHERS = 5.0  # seconds in which the other ranks are expected to call `agent`, too
_INSTEAD = (
    "Every rank would take trials of its own from the sweep, and only those of one rank would be trained. Start one "
    "agent that starts the job: in the sweep's configuration set command: [${env}, torchrun, --nproc-per-node, N, "
    "train.py, ${args}], call init in train.py without an agent, and run: wandb agent SWEEP."
)


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
    _refuse_several()
    return run_metadata.of_wandb("agent")(
        sweep_id, function=function, entity=entity, project=project, count=count, **others
    )


def _refuse_several() -> None:
    topology = inherited_rank.detect_or_none()
    if topology is None or topology.world_size == 1:
        return
    try:
        store = JobStore.find(_NAME, topology, DEFAULT_LIMITS.join_timeout)
    except RendezvousError:  # `init` raises it
        return
    rank, called = topology.global_rank, "called"
    if topology.is_coordinator:

        def others_call() -> bool | None:
            return (store is not None and store.has([called])) or None

        if store is None or not briefly(lambda: poll(others_call, _OTHERS, LONGEST_PAUSE), None, 2 * _OTHERS):
            return
    elif store is not None:
        briefly(lambda: store.publish(called, rank), None)
    raise ConfigurationError(
        f"wandb.agent was called on rank {rank} of {topology.world_size}, and on other ranks as well. {_INSTEAD}"
    )


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
    found: dict[str, Any] = {}
    if store is not None and sweeps.is_trial():
        found = briefly(lambda: store.get_present(["trial", _OTHER]), found)
    first, other = found.get("trial"), found.get(_OTHER)
    if not isinstance(first, dict) or not isinstance(other, dict) or other.get("rank") == topology.global_rank:
        return None
    return _different(topology, first.get("id"), other)


def _different(topology: Topology, trial: object, other: dict[str, Any]) -> ConfigurationError:
    return ConfigurationError(
        f"Rank {topology.global_rank} was given the trial {trial!r} of the sweep, but rank {other.get('rank')} the "
        f"trial {other.get('id')!r} (WANDB_RUN_ID), by agents of their own. {_INSTEAD}"
    )
