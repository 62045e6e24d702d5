"""The job's key-value store, through which ranks publish what all have to know.

Only the store is used, never a collective: it does not matter when, or whether, other ranks get here, and nothing can
pair with a collective of the training. Ranks set keys and poll with `check`, never with a blocking `wait`, so a rank
that never comes costs at most `join_timeout`. Anybody who reaches the store can read it: no secrets
(`settings.config_withheld`).

It is the store of the default process group or, before there is one, that of torchrun's agent; both are unwrapped to
the same root, because one rank may come before its process group exists and another one after. Keys lie under
``dist_wandb/RESTART/INTEGRATION/NUMBER/``, those for all restarts under ``dist_wandb/all/``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.store.connection import StoreConnection
from dist_wandb.store.polling import poll
from dist_wandb.store.timed_caller import TimedCaller, UnansweredError
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

_UNSET = "-"  # no JSON
LONGEST_PAUSE = 0.1  # seconds between two looks at the store
_FEW = 4  # keys that are looked up one by one
_MOST_AT_ONCE = 1024  # keys that are asked for in one call: the store answers nobody else meanwhile


class JobStore:
    """The job's store as one rank sees it, for one session.

    Args:
        store: A store that all ranks of the job reach.
        namespace: Prefix of the session's keys, equal on all ranks.
        topology: Who this rank is.
        timeout: How long to wait for other ranks, in seconds.
        connection: That of `store`; a new one if `None`.

    Attributes:
        namespace, topology, timeout: As given.
        connection: By which the store is called.
        own_keys: What this rank has set, also in the parts of it, `beside` and `below`.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        topology: Topology,
        timeout: float,
        connection: StoreConnection | None = None,
    ) -> None:
        import torch.distributed as dist

        self.namespace = namespace
        self.topology = topology
        self.timeout = timeout
        self.connection: StoreConnection = connection or StoreConnection(store, topology.global_rank, timeout)
        self.own_keys: set[str] = set()
        self._whole: JobStore | None = None
        self._store = dist.PrefixStore(namespace, store)

    @classmethod
    def find(cls, namespace: str, topology: Topology, timeout: float, *, lasting: bool = False) -> JobStore | None:
        """Reach the job's store: that of an initialised ``torch.distributed``, else that of torchrun's agent.

        Args:
            namespace: Prefix of the keys, equal on all ranks.
            topology: Who this rank is.
            timeout: How long to wait for other ranks, in seconds.
            lasting: Whether the keys are those of all attempts of the launcher, rather than of this one alone.

        Returns:
            The job's store, or `None` where there is none yet.

        Raises:
            RendezvousError: torchrun's store does not answer.
        """
        launch = Launch.detect()
        store = _store_of_process_group() or _store_of_agent(launch, topology, timeout)
        if store is None:
            return None
        attempt = "all" if lasting else launch.attempt
        return cls(store, f"dist_wandb/{attempt}/{namespace}", topology, timeout)

    def publish(self, key: str, value: Any) -> None:
        """Set `key` to a JSON value for all ranks to read."""
        self.record_key(key)
        self.connection.call(lambda: self._store.set(key, json.dumps(value)))

    def claim(self, key: str, value: Any) -> Any:
        """Set `key` to a JSON value unless it is set; return its value. The first claim of all ranks counts."""
        self.record_key(key)
        return _decoded(key, self.connection.call(lambda: self._store.compare_set(key, "", json.dumps(value))))

    def beside(self, namespace: str, caller: TimedCaller | None = None) -> JobStore:
        """A part of this session's keys, on a connection of its own where torch can make one (2.8 and newer).

        A thread that waits for an answer holds its connection; the training must not find it held.

        Args:
            namespace: Prefix of the keys.
            caller: Limits the time of answers on that connection; `None` for the time that other ranks are waited for.

        Raises:
            RendezvousError: The store is gone, or does not answer.
        """
        connection = self.connection.duplicate(self._store, caller)
        part = JobStore(connection.root, namespace, self.topology, self.timeout, connection)
        part._whole = self
        return part

    def below(self, namespace: str) -> JobStore:
        """A part of this session's keys, on the same connection.

        Args:
            namespace: Prefix of the keys.
        """
        part = JobStore(self._store, namespace, self.topology, self.timeout, self.connection)
        part._whole = self
        return part

    def record_key(self, key: str) -> None:
        """Remember a key that this rank sets, or has set by a process group."""
        if self._whole is None:
            self.own_keys.add(key)
        else:
            self._whole.record_key(f"{self.namespace}/{key}")

    def count(self, key: str) -> int:
        """Add 1 to a number that all ranks count up, and return it."""
        return int(self.connection.call(lambda: self._store.add(key, 1)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys, which nobody may need any more."""
        for key in list(keys):
            self.connection.call(functools.partial(self._store.delete_key, key))

    def store(self, prefix: str) -> Store:
        """The keys below a prefix as a store, for a process group to be formed over it."""
        import torch.distributed as dist

        return dist.PrefixStore(prefix, self._store)

    def try_get(self, key: str) -> Any | None:
        """The value of `key` if it is set; `None` otherwise. Waits for no rank."""
        return self.connection.call(lambda: _look_up(self._store, key))

    def try_get_soon(self, key: str) -> Any | None:
        """As `try_get`, but `None` also if the store does not answer soon: for what is good to know, not needed."""
        with suppress(UnansweredError):
            return self.connection.call(lambda: _look_up(self._store, key), soon=True)
        return None

    def has(self, keys: list[str]) -> bool:
        """Whether all of these keys are set. Never waits."""
        return bool(self.connection.call(lambda: self._store.check(keys)))

    def get_present(self, keys: list[str], *, soon: bool = False) -> dict[str, Any]:
        """The values of those keys that are set, by key. Never waits for a rank.

        Raises:
            UnansweredError: The store is to answer `soon`, and does not.
        """
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
        """The value of `key`, waiting for it up to the time limit, or `within` seconds.

        It polls with `check`: a blocking `wait` would hold the store that the training uses too.

        Raises:
            RendezvousError: It did not come. `publisher` is named in the message.
        """
        within = self.timeout if within is None else within
        if not poll(lambda: self.has([key]) or None, within, LONGEST_PAUSE, self.topology.world_size):
            raise RendezvousError(
                f"Rank {self.topology.global_rank} waited {within:g} s for {publisher} to publish {key!r}. "
                "Open the run on all ranks, without a rank guard around it, or raise join_timeout."
            )
        return self.try_get(key)


def not_of_a_rank(what: str, message: object, topology: Topology) -> RendezvousError:
    """The error for a value of the store that no rank has written in this form.

    Args:
        what: What the value should have been.
        message: The value.
        topology: The rank that has read it.
    """
    return RendezvousError(
        f"Rank {topology.global_rank} found {repr(message)[:100]} in the job's store as {what}, which no rank has "
        "written. Let all ranks use the same version of dist_wandb, and nothing else write into the store."
    )


def _store_of_process_group() -> Store | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.group.WORLD is None:
        return None
    store = dist.group.WORLD.get_group_store()
    while isinstance(store, dist.PrefixStore):  # down to torchrun's own, which ranks without a group use
        store = store.underlying_store
    return store


def _look_up(store: Store, key: str) -> Any | None:
    stored = _stored(store, key)
    return None if stored is None else _decoded(key, stored)


def _stored(store: Store, key: str) -> bytes | None:
    """Look up a key in one call: `get` would wait for it, and it may be deleted between a `check` and a `get`."""
    stored = store.compare_set(key, _UNSET, _UNSET)  # does not set it, because the expected value is another
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
