"""The identity of a job on all ranks: the base id of its runs, and the layout of its ranks over nodes.

*Layout.* Each rank publishes a name of its node (host, boot id, node rank variable), and the last one publishes which
ranks share a node. If launcher variables do not give the layout and the plan needs it (worker scope, shared mode), a
rank waits for it. If only the startup message needs it, a rank waits for one second, because other ranks may be waiting
at a barrier.

*Base id.* The coordinator publishes it. Other ranks read it only if their plan uses it. In `auto` mode with global
scope none does, so rank 0 may be alone. Without a store, it is a hash of the launcher's name for the job (a SLURM step
of the same ranks, a PMIx namespace). If there is none, an error explains the options.
"""

from __future__ import annotations

import hashlib
import secrets
import string
import warnings
from collections.abc import Sequence

from dist_wandb.errors import ConfigurationError, RendezvousError
from dist_wandb.job.job_store import LONGEST_PAUSE, JobStore, RankValues, is_first, not_of_a_rank
from dist_wandb.job.launch import job_name, node_identity
from dist_wandb.job.ranges import blocks_of, named, numbers_in, spans_of, values_in
from dist_wandb.job.timed_caller import interval, poll
from dist_wandb.job.topology import Topology

_ID_ALPHABET = string.ascii_lowercase + string.digits
_ID_LENGTH = 8  # like W&B's own ids
_OPTIONAL_TIMEOUT = 1.0  # seconds to wait for a layout on which no plan depends
_TERM = 2.0  # seconds that an elected rank has to publish which ranks are missing
_BASE_ID, _NODE, _LAYOUT, _MISSING = "base_id", "node", "layout", "layout/missing"  # keys


def make_id() -> str:
    """Return a random run id like W&B's own: eight lower-case letters and digits."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


def learn_layout(job_store: JobStore, topology: Topology, *, needed: bool) -> Topology:
    # All ranks call this. A rank that knows its layout publishes its name without waiting, because others may need it.
    # The last rank publishes the layout, so that the others poll a single key. Raises RendezvousError if a plan needs
    # the layout, and some ranks did not publish their node in time.
    nodes = RankValues(job_store, _NODE)
    if nodes.publish(node_identity()) and (names := nodes.try_get_all(_OPTIONAL_TIMEOUT)) is not None:
        _publish_layout(job_store, names)
    if topology.knows_layout:
        return topology
    within = job_store.timeout if needed else _OPTIONAL_TIMEOUT
    layout = poll(lambda: job_store.try_get(_LAYOUT), within, LONGEST_PAUSE, topology.world_size)
    if layout is None and needed:
        layout = _missed_layout(job_store, nodes)
    return topology if layout is None else topology.with_layout(list(map(str, values_in(layout))))


def _publish_layout(job_store: JobStore, names: Sequence[str]) -> list[list[int]]:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    layout = blocks_of(numbers[name] for name in names)
    job_store.publish(_LAYOUT, layout)
    return layout


def _missed_layout(job_store: JobStore, nodes: RankValues) -> list[list[int]]:
    """Find out why the layout is missing. An elected rank does this for all; if it is gone, each rank does."""
    rank, world_size = job_store.topology.global_rank, job_store.topology.world_size
    missing: list[int] | None = None
    if not is_first(job_store, f"{_LAYOUT}/elected"):
        within = interval(_TERM, world_size)
        spans = poll(lambda: job_store.try_get(_MISSING), within, LONGEST_PAUSE, world_size)
        if (layout := job_store.try_get(_LAYOUT)) is not None:
            found: list[list[int]] = layout
            return found
        missing = None if spans is None else numbers_in(spans)
    if missing is None:
        names = nodes.try_get_all(0.0)
        if names is not None:  # the last rank has not published the layout yet
            return _publish_layout(job_store, names)
        missing = nodes.missing()
        job_store.publish(_MISSING, spans_of(missing))
    raise RendezvousError(
        f"Rank {rank} waited {job_store.timeout:g} s for the {_NODE!r} of {named(missing)} of {world_size}, without "
        "which the layout of ranks over nodes is unknown. Open the run on all ranks, without a rank guard around it, "
        "or raise join_timeout."
    )


def agree_on_base_id(
    job_store: JobStore | None, topology: Topology, requested: str | None, proposed: str | None, session_name: str
) -> str:
    # Only the coordinator's request is used, because scripts often generate an id in each process. Without a store, the
    # id depends on the session's name. Raises RendezvousError if there is no way to agree, and as `wait_base_id` does.
    if job_store is None and (known := requested or id_of_job(session_name, topology)):
        return known
    if job_store is None:
        raise RendezvousError(
            f"Rank {topology.global_rank} of {topology.world_size} ({topology.origin('global_rank')}) has no way to "
            "agree on a run id with the other ranks: torch.distributed is not initialised, and the launcher gives the "
            "job neither a store nor a name. Call init_process_group first, or pass id= (the same on all ranks), or "
            "set WANDB_RUN_ID."
        )
    if topology.is_coordinator:
        base_id = requested or proposed or make_id()
        publish_base_id(job_store, base_id)
        return base_id
    agreed = wait_base_id(job_store, topology)
    if requested not in (None, agreed):
        rank, main = topology.global_rank, f"rank {topology.coordinator}"
        message = f"Rank {rank} was given the run id {requested!r}, {main} {agreed!r}: {main}'s is used."
        warnings.warn(f"{message} Pass the same id on all ranks, or leave it to dist_wandb.", stacklevel=2)
    return agreed


def publish_base_id(job_store: JobStore, base_id: str | None) -> None:
    job_store.publish(_BASE_ID, {"base_id": base_id, "refused": None})


def refuse(job_store: JobStore | None, topology: Topology, reason: str) -> None:
    """Publish on the coordinator that there will be no base id, for ranks that wait for it."""
    if job_store is not None and topology.is_coordinator:
        job_store.publish(_BASE_ID, {"base_id": None, "refused": reason})


def refusal(job_store: JobStore) -> str | None:
    message = job_store.try_get(_BASE_ID)
    return message.get("refused") if isinstance(message, dict) else None


def is_base_id_known(job_store: JobStore) -> bool:
    return job_store.has([_BASE_ID])


def wait_base_id(job_store: JobStore, topology: Topology, within: float | None = None) -> str:
    message = job_store.wait_get(_BASE_ID, f"rank {topology.coordinator}", within)
    if isinstance(message, dict) and message.get("refused"):
        raise ConfigurationError(f"Rank {topology.coordinator} opens no run: {message['refused']}")
    if not isinstance(message, dict) or not isinstance(base_id := message.get("base_id"), str):
        raise not_of_a_rank("base id", message, topology)
    return base_id


def id_of_job(session_name: str, topology: Topology) -> str | None:
    """Return a base id from the launcher's name for this start of the job, if any, and the name of the session."""
    name = job_name(topology)
    if name is None:
        return None
    digest = hashlib.sha256(f"{name}/{session_name}".encode()).digest()
    return "".join(_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest[:_ID_LENGTH])
