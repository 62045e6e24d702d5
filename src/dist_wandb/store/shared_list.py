"""Lists in the job's store to which all ranks append. Polling one for new values reads a single key."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from dist_wandb.errors import RendezvousError
from dist_wandb.store.job_store import LONGEST_PAUSE, JobStore
from dist_wandb.store.polling import poll
from dist_wandb.store.timed_caller import UnansweredError
from dist_wandb.topology.ranges import named


class SharedList:
    """A list in the job's store: its counter is incremented, then the value set; a death in between leaves a gap."""

    def __init__(self, keys: JobStore, name: str) -> None:
        self._keys = keys
        self._name = name
        self.values: list[Any] = []  # those that this rank has read
        self._known = 0  # number of indices that were read, or are in `_unread`
        self._unread: list[int] = []
        self._lock = threading.Lock()  # an abandoned call may overlap with the next one

    def append(self, value: Any) -> int:
        """Append a value; return its index, starting at 1."""
        self._keys.record_key(f"{self._name}/count")
        index = self._keys.count(f"{self._name}/count")
        self._keys.publish(f"{self._name}/{index}", value)
        return index

    def append_one_of(self, value: Any, number: int) -> bool:
        """Append a value, as `number` ranks do once each; return whether the list is complete, as exactly one finds."""
        self.append(value)
        # A second counter, because the rank with the last index may set its value before another rank does.
        self._keys.record_key(f"{self._name}/there")
        return self._keys.count(f"{self._name}/there") >= number

    def append_once(self, value: str | int) -> None:
        """Append a value unless the list has it, so that `count` is the number of distinct values."""
        self._keys.record_key(f"{self._name}/of/{value}")
        if self._keys.count(f"{self._name}/of/{value}") == 1:
            self.append(value)

    def count(self) -> int:
        """Return the number of values, including those that are about to be set."""
        return int(self._keys.try_get(f"{self._name}/count") or 0)

    def read_new(self) -> list[Any]:
        """Read and return the new values, in order."""
        return self._read(self.count())

    def read_new_soon(self) -> list[Any]:
        """Read and return the new values, in order; none if the store does not answer soon."""
        with suppress(UnansweredError):
            return self._read(int(self._keys.try_get_soon(f"{self._name}/count") or 0), soon=True)
        return []

    def _read(self, count: int, *, soon: bool = False) -> list[Any]:
        with self._lock:
            self._unread += range(self._known + 1, count + 1)
            self._known = max(self._known, count)
            keys = [f"{self._name}/{index}" for index in self._unread]
        if not keys:
            return []
        found = self._keys.get_present(keys, soon=soon)
        with self._lock:
            new = {index: found[f"{self._name}/{index}"] for index in self._unread if f"{self._name}/{index}" in found}
            self._unread = [index for index in self._unread if index not in new]
            self.values += new.values()
        return list(new.values())


class RankValues:
    """One rank's access to the values of all ranks. Only one rank should read them, and publish a summary."""

    def __init__(self, job_store: JobStore, key: str) -> None:
        self._job_store = job_store
        self._key = key
        self._published = SharedList(job_store, key)

    def publish(self, value: Any) -> bool:
        """Publish the value of this rank; return whether it is the last one."""
        topology = self._job_store.topology
        return self._published.append_one_of([topology.global_rank, value], topology.world_size)

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
        return dict(self._published.values)


def missed(job_store: JobStore, key: str, missing: list[int]) -> RendezvousError:
    """Return the error for ranks that did not publish a value in time."""
    topology = job_store.topology
    return RendezvousError(
        f"Rank {topology.global_rank} waited {job_store.timeout:g} s for the {key!r} of {named(missing)} of "
        f"{topology.world_size}, without which the layout of ranks over nodes is unknown. Open the run on all ranks, "
        "without a rank guard around it, or raise join_timeout."
    )
