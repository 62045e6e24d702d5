"""Continuing the run of an earlier start: the arguments of `wandb.init`, and the message about it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError
from dist_wandb.restart.store import Earlier
from dist_wandb.runs import console, requested
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from dist_wandb.settings.options import Options

_started: Counter[str] = Counter()


def session_name(integration: str, number: int | None) -> str:
    """Return a name of the integration's next session that is equal at every start, for any world size.

    `number` is the session's number among the integration's, if the integration knows it; it is counted otherwise.
    """
    if number is None:
        _started[integration] += 1
        number = _started[integration]
    return f"{integration}/{number}"


def continued(
    init_arguments: Mapping[str, Any], earlier: Earlier | None, topology: Topology, *, has_store: bool
) -> Mapping[str, Any]:
    """Return the arguments of `wandb.init` that continue the runs of an earlier start; unchanged if there is none.

    `earlier` is known only on the rank that searched for it. `has_store`: whether the ranks can agree on the base id.
    """
    resume = requested.resume(init_arguments)
    if earlier is not None:
        given = {} if requested.continues(init_arguments) else {"resume": "allow"}
        return {**init_arguments, **given, "id": earlier.record.base_id}
    is_named_by_job = topology.world_size > 1 and not has_store and requested.run_id(init_arguments) is None
    if is_named_by_job and Launch.detect().requeues and resume is None:
        return {
            **init_arguments,
            "resume": "allow",
        }  # SLURM keeps the job's name, from which the id is made
    return init_arguments


def name_for_id(session: str, init_arguments: Mapping[str, Any]) -> str:
    """Return a name of the session from which its base id can be made if only the launcher's job name is known."""
    requeues = Launch.detect().requeues
    return f"{session}/{requeues}" if requeues and requested.resume(init_arguments) == "never" else session


def can_look_back(options: Options, topology: Topology, *, has_store: bool) -> bool:
    """Return whether the coordinator can choose the base id, rather than derive it from what all ranks know."""
    is_alone = topology.world_size == 1 or (options.run_mode == "auto" and options.rank_scope == "global")
    return has_store or is_alone


def check_resume(init_arguments: Mapping[str, Any], options: Options, topology: Topology, *, has_store: bool) -> None:
    """Raise `ConfigurationError` for ``resume="auto"`` if only one rank would know the run."""
    if can_look_back(options, topology, has_store=has_store) or requested.run_id(init_arguments) is not None:
        return
    if requested.resume(init_arguments) == "auto":
        raise ConfigurationError(
            f"resume='auto' takes the run id from a restart record that one process finds, but {topology.world_size} "
            "ranks need it, and have no way to agree on it yet. Call init_process_group first, or pass id= (the same "
            "at every start) with resume='allow', or set WANDB_RUN_ID."
        )


def announce(earlier: Earlier, topology: Topology) -> None:
    """Print one line about the run that is continued, and why."""
    if console.is_silent():
        return
    before = earlier.record.world_size
    change = "" if before == topology.world_size else f" It had {before} ranks, and has {topology.world_size} now."
    line = f"dist_wandb: continues the run {earlier.record.base_id} of an earlier start ({earlier.reason}).{change}"
    print(line, file=sys.stderr, flush=True)  # noqa: T201  # as the line at the start
