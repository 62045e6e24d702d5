"""One value from each rank of the job, under a common key."""

from __future__ import annotations

from typing import Any

from dist_wandb.errors import RendezvousError
from dist_wandb.store.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.store.polling import poll


def publish_own(job_store: JobStore, key: str, value: Any) -> None:
    """Publish the value of this rank."""
    job_store.publish(f"{key}/{job_store.topology.global_rank}", value)


def try_get_all(job_store: JobStore, key: str, within: float) -> list[Any] | None:
    """The values of all ranks in the order of global ranks; `None` if some are missing after `within` seconds."""
    keys = _keys(job_store, key)
    return job_store.get_all(keys) if poll(lambda: job_store.has(keys) or None, within, LONGEST_PAUSE) else None


def wait_get_all(job_store: JobStore, key: str) -> list[Any]:
    """The values of all ranks, in the order of global ranks.

    Raises:
        RendezvousError: Some ranks did not come within the time limit; they are named.
    """
    values = try_get_all(job_store, key, job_store.timeout)
    if values is None:
        missing = [rank for rank, each in enumerate(_keys(job_store, key)) if job_store.try_get(each) is None]
        raise RendezvousError(
            f"Rank {job_store.topology.global_rank} waited {job_store.timeout:g} s for the {key!r} of rank "
            f"{', '.join(map(str, missing))} of {job_store.topology.world_size}, without which "
            "the layout of ranks over nodes is unknown. Open the run on all ranks, without a rank guard around it, "
            "or raise join_timeout."
        )
    return values


def _keys(job_store: JobStore, key: str) -> list[str]:
    return [f"{key}/{rank}" for rank in range(job_store.topology.world_size)]
