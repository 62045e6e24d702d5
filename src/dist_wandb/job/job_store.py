"""The job's key-value store, through which ranks publish shared values, and lists to which all ranks append.

Only the store is used, never a collective. So it does not matter when, or whether, other ranks arrive, and no call can
pair with a collective of the training. Ranks set keys and poll with `check`, never with a blocking `wait`, so a rank
that never arrives costs at most `join_timeout`. Anyone who reaches the store can read it, so it holds no secrets
(`settings.config_values`).

It is the store of the default process group or, before there is one, the store of torchrun's agent. Both are unwrapped
to the same root, because ranks may open it before or after their process group exists. Keys have the prefix
``dist_wandb/RESTART/INTEGRATION/NUMBER/``; keys for all restarts have the prefix ``dist_wandb/all/``.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.job.connection import StoreConnection
from dist_wandb.job.launch import Launch
from dist_wandb.job.timed_caller import TimedCaller, UnansweredError, poll
from dist_wandb.job.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

_UNSET = "-"  # not valid JSON
LONGEST_PAUSE = 0.1  # seconds between two polls of the store, before the pause grows with the time waited
_FEW = 4  # keys that are looked up one by one
_MOST_AT_ONCE = 1024  # maximum keys in one call, during which the store does not serve other ranks


class JobStore:
    """One rank's access to the keys of a session in the job's store."""

    def __init__(
        self,
        store: Store,
        namespace: str,  # prefix of the session's keys, equal on all ranks
        topology: Topology,
        timeout: float,  # for other ranks, in seconds
        connection: StoreConnection | None = None,
    ) -> None:
        import torch.distributed as dist

        self.namespace = namespace
        self.topology = topology
        self.timeout = timeout
        self.connection: StoreConnection = connection or StoreConnection(store, topology.global_rank, timeout)
        self.own_keys: set[str] = set()  # those that this rank has set, also through `beside` and `below`
        self._within = ""  # prefix of keys in that set: the namespaces of this part of a store
        self._store = dist.PrefixStore(namespace, store)

    @classmethod
    def find(cls, namespace: str, topology: Topology, timeout: float, *, lasting: bool = False) -> JobStore | None:
        # `None` if there is none yet. Keys in the store of torchrun's agent, which outlives the processes, are of this
        # attempt, or of all (`lasting`). Other stores are of one start; its attempt may differ between nodes. Raises
        # RendezvousError if torchrun's store does not answer. So do all other methods if the store does not.
        launch, store = Launch.detect(), None
        dist: Any = sys.modules.get("torch.distributed")  # not imported: there is no group, and it would take seconds
        if dist is not None and dist.is_available() and dist.is_initialized() and dist.group.WORLD is not None:
            store = dist.group.WORLD.get_group_store()
            while isinstance(store, dist.PrefixStore):  # unwrap to torchrun's store, which ranks without a group use
                store = store.underlying_store
        store = store or _store_of_agent(launch, topology, timeout)
        if store is None:
            return None
        attempt = "all" if lasting else launch.attempt if launch.agent_store else 0
        return cls(store, f"dist_wandb/{attempt}/{namespace}", topology, timeout)

    def publish(self, key: str, value: Any) -> None:
        self.record_key(key)
        self.connection.call(lambda: self._store.set(key, json.dumps(value)))

    def claim(self, key: str, value: Any) -> Any:
        """Set a key to a JSON value unless it is set; return its value: the first claim of all ranks."""
        self.record_key(key)
        return _decoded(key, self.connection.call(lambda: self._store.compare_set(key, "", json.dumps(value))))

    def beside(self, namespace: str, caller: TimedCaller | None = None) -> JobStore:
        # This is a dedicated connection: a thread that waits for an answer blocks its own, which must not be the
        # training's. `caller` limits the time of calls on it.
        connection = self.connection.duplicate(self._store, caller)
        return self._part(connection.root, namespace, connection)

    def below(self, namespace: str) -> JobStore:
        return self._part(self._store, namespace, self.connection)

    def _part(self, store: Store, namespace: str, connection: StoreConnection) -> JobStore:
        part = JobStore(store, namespace, self.topology, self.timeout, connection)
        part.own_keys, part._within = self.own_keys, f"{self._within}{namespace}/"
        return part

    def record_key(self, key: str) -> None:
        """Add a key to `own_keys` that this rank, or its process group, sets."""
        self.own_keys.add(f"{self._within}{key}")

    def count(self, key: str) -> int:  # its new value
        self.record_key(key)
        return int(self.connection.call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self.connection.call(functools.partial(self._store.delete_key, key))

    def store(self, prefix: str) -> Store:
        import torch.distributed as dist

        return dist.PrefixStore(prefix, self._store)

    def try_get(self, key: str, *, soon: bool = False) -> Any | None:
        """Return the value of a key; `None` if it is not set or, if `soon`, if the store does not answer soon."""
        with suppress(UnansweredError):
            return self.get_present([key], soon=soon).get(key)
        return None

    def has(self, keys: list[str]) -> bool:  # whether all are set
        return bool(self.connection.call(lambda: self._store.check(keys)))

    def get_present(self, keys: list[str], *, soon: bool = False) -> dict[str, Any]:
        """Return the values of those keys that are set; for `soon`, see `StoreConnection.call`."""
        call = functools.partial(self.connection.call, soon=soon)
        if len(keys) <= _FEW:
            found = {key: call(functools.partial(_stored, self._store, key)) for key in keys}
            return {key: _decoded(key, stored) for key, stored in found.items() if stored is not None}
        if len(keys) <= _MOST_AT_ONCE and call(lambda: self._store.check(keys)):
            values = call(lambda: self._store.multi_get(keys))
            return dict(zip(keys, map(_decoded, keys, values), strict=True))
        middle = min(len(keys) // 2, _MOST_AT_ONCE)
        return {**self.get_present(keys[:middle], soon=soon), **self.get_present(keys[middle:], soon=soon)}

    def wait_get(self, key: str, publisher: str, within: float | None = None) -> Any:
        """Wait for the value of a key, or raise RendezvousError. A blocking `wait` would block the training, too."""
        within = self.timeout if within is None else within
        if not poll(lambda: self.has([key]) or None, within, LONGEST_PAUSE, self.topology.world_size):
            raise RendezvousError(
                f"Rank {self.topology.global_rank} waited {within:g} s for {publisher} to publish {key!r}. "
                "Open the run on all ranks, without a rank guard around it, or raise join_timeout. If only some ranks "
                "open it, pass primary_rank= with one of these."
            )
        return self.try_get(key)


class SharedList:
    """A list in the job's store: its counter is incremented, then the value set; a death in between leaves a gap."""

    def __init__(self, keys: JobStore, name: str) -> None:
        self._keys = keys
        self._name = name
        self.values: list[Any] = []  # those that this rank has read
        self._known = 0  # number of indices that were read, or are in `_unread`
        self._unread: list[int] = []
        self._lock = threading.Lock()  # an abandoned call may overlap with the next one

    def append(self, value: Any) -> int:  # its index, starting at 1
        index = self._keys.count(f"{self._name}/count")
        self._keys.publish(f"{self._name}/{index}", value)
        return index

    def append_one_of(self, value: Any, number: int) -> bool:
        """Append a value, as `number` ranks do once each; return whether the list is complete, as exactly one finds."""
        self.append(value)
        # A second counter, because the rank with the last index may set its value before another rank does.
        return self._keys.count(f"{self._name}/there") >= number

    def append_once(self, value: str | int) -> None:
        """Append a value unless the list has it, so that `count` is the number of distinct values."""
        if self._keys.count(f"{self._name}/of/{value}") == 1:
            self.append(value)

    def count(self) -> int:  # with those that are about to be set
        return int(self._keys.try_get(f"{self._name}/count") or 0)

    def read_new(self, *, soon: bool = False) -> list[Any]:
        """Read and return the new values, in order; if `soon`, none if the store does not answer soon."""
        count = int(self._keys.try_get(f"{self._name}/count", soon=soon) or 0)
        with self._lock:
            self._unread += range(self._known + 1, count + 1)
            self._known = max(self._known, count)
            keys = [f"{self._name}/{index}" for index in self._unread]
        found: dict[str, Any] = {}
        with suppress(UnansweredError):
            found = self._keys.get_present(keys, soon=soon)
        with self._lock:
            new = {index: found[f"{self._name}/{index}"] for index in self._unread if f"{self._name}/{index}" in found}
            self._unread = [index for index in self._unread if index not in new]
            self.values += new.values()
        return list(new.values())


class RankValues(SharedList):
    """The list of one value from each rank. Only one rank should read them, and publish a summary."""

    def publish(self, value: Any) -> bool:  # whether it is the last one
        topology = self._keys.topology
        return self.append_one_of([topology.global_rank, value], topology.world_size)

    def read(self) -> dict[int, Any]:
        self.read_new()
        return dict(self.values)

    def try_get_all(self, within: float) -> list[Any] | None:
        """Return the values of all ranks, ordered by rank; `None` if some are missing after `within` seconds."""
        world_size = self._keys.topology.world_size
        poll(lambda: len(self.read()) >= world_size or None, within, LONGEST_PAUSE)
        values = dict(self.values)
        return [values[rank] for rank in range(world_size)] if len(values) >= world_size else None

    def missing(self) -> list[int]:
        return sorted(set(range(self._keys.topology.world_size)) - dict(self.values).keys())


def is_first(store: JobStore, key: str) -> bool:  # whether no other rank has claimed it before
    return bool(store.claim(key, store.topology.global_rank) == store.topology.global_rank)


def not_of_a_rank(what: str, message: object, topology: Topology) -> RendezvousError:
    """Return the error for a value in the store that does not have the form of `what` it should be."""
    return RendezvousError(
        f"Rank {topology.global_rank} found {repr(message)[:100]} in the job's store as {what}, which no rank has "
        "written. Install the same version of dist_wandb on all ranks, and let nothing else write to the store."
    )


def _stored(store: Store, key: str) -> bytes | None:
    """Look up a key in one call: `get` would wait for it, and it may be deleted between a `check` and a `get`."""
    stored = store.compare_set(key, _UNSET, _UNSET)  # does not set the key, because the expected value differs
    return None if stored == _UNSET.encode() else stored


def _decoded(key: str, stored: bytes) -> Any:
    try:
        return json.loads(stored)
    except (ValueError, RecursionError) as error:
        raise RendezvousError(
            f"The job's store holds {stored[:100]!r} as {key!r}, which no rank of this session has written ({error}). "
            "Something else writes to the store, or a rank has another version of dist_wandb."
        ) from error


def _store_of_agent(launch: Launch, topology: Topology, timeout: float) -> Store | None:
    if launch.agent_store is None:
        return None
    import torch.distributed as dist

    host, port = launch.agent_store
    limit = timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, topology.world_size, is_master=False, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise RendezvousError(
            f"Rank {topology.global_rank} cannot reach torchrun's store at {host}:{port} (MASTER_ADDR, MASTER_PORT): "
            f"{error}. Unset TORCHELASTIC_USE_AGENT_STORE if torchrun did not start this process."
        ) from error
