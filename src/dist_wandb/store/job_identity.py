"""What identifies the job on all ranks: the base id of its runs, and the layout of its ranks over nodes.

*Layout.* Each rank publishes a name of its node (host, boot id, node rank variable). Where launcher variables do not
have the layout and the plan needs it (worker scope, shared mode), a rank waits for all names and derives it. Where only
the line at the start needs it, a rank waits for a second: the others may be standing at a barrier.

*Base id.* The coordinator publishes it; others fetch it only if their plan names it. In `auto` with global scope none
does, so rank 0 may be alone. Without a store it is a hash of the launcher's name for the job (a SLURM step of the same
ranks, a PMIx namespace); else an error says what to do.
"""

from __future__ import annotations

import hashlib
import secrets
import string
import warnings
from typing import TYPE_CHECKING, NoReturn

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.settings.plan import tells_job
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.rank_values import publish_own, try_get_all, wait_get_all
from dist_wandb.topology.launch import job_name, node_identity
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    pass

_ID_ALPHABET = string.ascii_lowercase + string.digits
_ID_LENGTH = 8  # as W&B's own ids
_GLANCE = 1.0  # seconds that a layout which no plan depends on is waited for
BASE_ID = "base_id"  # the key of it


def make_id() -> str:
    """A random run id in the form of W&B's own: eight lower-case letters and digits."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


def learn_layout(job_store: JobStore, topology: Topology, *, needed: bool) -> Topology:
    """Complete the layout of `topology` from what every rank says about its node.

    Every rank calls this, also those that know their place: others may depend on what they say. These do not wait.

    Args:
        job_store: The job's store.
        topology: Who this rank is.
        needed: Whether a plan depends on it. Otherwise it is for a message, and hardly waited for.

    Raises:
        RendezvousError: It is needed, but some ranks did not come within the time limit.
    """
    publish_own(job_store, "node", node_identity())
    if topology.knows_layout:
        return topology
    nodes = wait_get_all(job_store, "node") if needed else try_get_all(job_store, "node", _GLANCE)
    return topology if nodes is None else topology.with_layout(nodes)


def agree_on_base_id(
    job_store: JobStore | None, topology: Topology, wanted: str | None, proposed: str | None, session_name: str
) -> str:
    """The base id of the rank that leads the job, rank 0 as a rule, on all ranks.

    Args:
        job_store: The job's store, if there is one yet.
        topology: Who this rank is.
        wanted: The id that the user asked for on this rank. The leading rank's counts: scripts often make one up per
            process.
        proposed: The id to use where the user asked for none, if this is the leading rank; made up if `None`.
        session_name: Name of the session, equal on all ranks, for launchers that name the job but keep no store.

    Raises:
        RendezvousError: There is no way to agree, or the leading rank did not come within the time limit.
        ConfigurationError: The leading rank opens no runs as they are wanted; see `refuse`.
    """
    if job_store is None:
        return wanted or id_of_job(session_name, topology) or _no_way_to_agree(topology)
    if tells_job(topology):
        base_id = wanted or proposed or make_id()
        job_store.publish(BASE_ID, base_id)
        return base_id
    told = job_store.wait_get(BASE_ID, f"rank {topology.main_rank}")
    if isinstance(told, dict) and "refused" in told:
        raise ConfigurationError(f"Rank {topology.main_rank} opens no run: {told['refused']}")
    if not isinstance(told, str):
        raise RendezvousError(f"The job's store holds {repr(told)[:100]} as base id, which no rank has written.")
    agreed = told
    if wanted not in (None, agreed):
        main = f"rank {topology.main_rank}"
        message = f"Rank {topology.global_rank} was given the run id {wanted!r}, {main} {agreed!r}: {main}'s is used."
        warnings.warn(f"{message} Make the id once, or leave it to dist_wandb.", stacklevel=2)
    return agreed


def refuse(job_store: JobStore | None, topology: Topology, reason: str) -> None:
    """As the leading rank, tell those that wait for the base id that there will be none."""
    if job_store is not None and tells_job(topology):
        job_store.publish(BASE_ID, {"refused": reason})


def id_of_job(session_name: str, topology: Topology) -> str | None:
    """A base id made from the launcher's name for this start of the job; `None` where it has no such name.

    Args:
        session_name: Name of the session, equal on all ranks.
        topology: Who this rank is.
    """
    name = job_name(topology)
    if name is None:
        return None
    digest = hashlib.sha256(f"{name}/{session_name}".encode()).digest()
    return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest[:_ID_LENGTH])


def _no_way_to_agree(topology: Topology) -> NoReturn:
    raise RendezvousError(
        f"Rank {topology.global_rank} of {topology.world_size} ({topology.origin('global_rank')}) has no way to agree "
        "on a run id with the other ranks: torch.distributed is not initialised, and the launcher gives the job "
        "neither a store nor a name. Call init_process_group first, or pass id= (the same on all ranks), or set "
        "WANDB_RUN_ID."
    )
