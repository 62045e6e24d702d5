"""One value from each rank of the job, under a common key."""

from __future__ import annotations

from typing import Any, NamedTuple

from dist_wandb.errors import RendezvousError
from dist_wandb.store.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.store.polling import poll
from dist_wandb.store.shared_list import SharedList
from dist_wandb.topology.ranges import named


class RankValue(NamedTuple):
    """An entry of the list: a global rank, and its value."""

    rank: int
    value: Any


class RankValues:
    """One rank's access to the values of all ranks. Only one rank should read them, and publish a summary."""

    def __init__(self, job_store: JobStore, key: str) -> None:
        self._job_store = job_store
        self._key = key
        self._published = SharedList(job_store, key)

    def publish(self, value: Any) -> bool:
        """Publish the value of this rank; return whether it is the last one."""
        topology = self._job_store.topology
        return self._published.append_one_of(RankValue(topology.global_rank, value), topology.world_size)

    def read(self) -> dict[int, Any]:
        """Return all published values by global rank."""
        self._published.read_new()
        return self._known()

    def try_get_all(self, within: float) -> list[Any] | None:
        """Return the values of all ranks, ordered by rank; `None` if some are missing after `within` seconds."""
        world_size = self._job_store.topology.world_size
        poll(lambda: len(self.read()) >= world_size or None, within, LONGEST_PAUSE)
        values = self._known()
        return [values[rank] for rank in range(world_size)] if len(values) >= world_size else None

    def missing(self) -> list[int]:
        """Return the ranks whose values have not been read."""
        return sorted(set(range(self._job_store.topology.world_size)) - self._known().keys())

    def _known(self) -> dict[int, Any]:
        return {one.rank: one.value for one in (RankValue(*entry) for entry in self._published.values)}


def missed(job_store: JobStore, key: str, missing: list[int]) -> RendezvousError:
    """Return the error for ranks that did not publish a value in time."""
    topology = job_store.topology
    return RendezvousError(
        f"Rank {topology.global_rank} waited {job_store.timeout:g} s for the {key!r} of {named(missing)} of "
        f"{topology.world_size}, without which the layout of ranks over nodes is unknown. Open the run on all ranks, "
        "without a rank guard around it, or raise join_timeout."
    )
