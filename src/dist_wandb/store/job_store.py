"""The job's key-value store, through which ranks tell each other what all have to know.

Only the store is used, never a collective: it does not matter when, or whether, other ranks get here, and nothing can
pair with a collective of the training. Ranks set keys and poll with `check`, never with a blocking `wait`, so a rank
that never comes costs at most `join_timeout`. Anybody who reaches the store can read it: no secrets
(`settings.config_withheld`).

It is the store of the default process group or, before there is one, that of torchrun's agent; both are unwrapped to
the same root, because one rank may come before its process group exists and another one after. Keys lie under
``dist_wandb/RESTART/INTEGRATION/NUMBER/``, those for all restarts under ``dist_wandb/all/``.

A connection that the host has closed is not used again, because torch would write a stack trace; where it is our own,
that is looked at before each use. Before another one is made (`beside`), the first is tried: torch tries for minutes to
connect to a store that is gone.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import RendezvousError
from dist_wandb.store.addresses import address_towards, connections_to, is_hung_up
from dist_wandb.store.timed_caller import TimedCaller, UnansweredError
from dist_wandb.topology.launch import Launch
from dist_wandb.topology.model import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

_GLANCE = 1.0  # seconds
_LEAST_PATIENCE = 2.0  # seconds that the store gets to answer, however short others are waited for
_UNSET = "-"  # no JSON
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks at the store


class _Fate:
    """What a session's connections to the job's store share.

    Attributes:
        gone: Why the store's host is taken to have ended, once it is.
    """

    gone: RuntimeError | None = None


class JobStore:
    """The job's store as one rank sees it, for one session.

    Args:
        store: A store that all ranks of the job reach.
        namespace: Prefix of the session's keys, equal on all ranks.
        topology: Who this rank is.
        timeout: How long to wait for other ranks, in seconds.
        caller: Limits the time of the store's answers; `None` for the time that other ranks are waited for.

    Attributes:
        namespace: As given.
        own_keys: What this rank has set, also in the parts of it, `beside` and `below`.
    """

    def __init__(
        self, store: Store, namespace: str, topology: Topology, timeout: float, caller: TimedCaller | None = None
    ) -> None:
        import torch.distributed as dist

        self._root = store
        self.namespace = namespace
        self.own_keys: set[str] = set()
        self._within: tuple[JobStore, str] | None = None
        self._store = dist.PrefixStore(namespace, store)
        self._topology = topology
        self._timeout = timeout
        self._caller = caller or TimedCaller(max(timeout, _LEAST_PATIENCE))
        self._quick_caller = self._caller.at_most(_GLANCE)
        self._fate = _Fate()
        self._connection: int | None = None  # where it has one of its own: the descriptor

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
        self._reaching(lambda: self._store.set(key, json.dumps(value)))

    def claim(self, key: str, value: Any) -> Any:
        """Set `key` to a JSON value unless it is set; return what it is now. The first claim of all ranks counts."""
        self.record_key(key)
        return _understood(key, self._reaching(lambda: self._store.compare_set(key, "", json.dumps(value))))

    def beside(self, namespace: str, caller: TimedCaller | None = None) -> JobStore:
        """A part of this session's keys, on a connection of its own where torch can make one (2.8 and newer).

        A thread that waits for an answer holds its connection; the training must not find it held.

        Args:
            namespace: Prefix of the keys.
            caller: Limits the time of answers on that connection; `None` for the time that other ranks are waited for.

        Raises:
            RendezvousError: The store is gone, or does not answer.
        """
        clone, store = getattr(self._store, "clone", None), self._store
        new: set[int] = set()
        if clone is not None:
            self.has([namespace])  # a store that is gone fails this at once; to connect to it is tried for minutes
            port = getattr(self._tcp_store(), "port", 0)
            before = connections_to(port)
            store = self._reaching(clone)
            new = connections_to(port) - before
        part = self._part(JobStore(store, namespace, self._topology, self._timeout, caller))
        if len(new) == 1:  # otherwise another thread has made one at the same time
            (part._connection,) = new  # noqa: SLF001  # of its own kind
        return part

    def below(self, namespace: str) -> JobStore:
        """A part of this session's keys, on the same connection.

        Args:
            namespace: Prefix of the keys.
        """
        return self._part(JobStore(self._store, namespace, self._topology, self._timeout, self._caller))

    def around(self) -> JobStore:
        """The keys beside those of this session: what holds for all sessions of its integration."""
        return self.at(self.namespace.rpartition("/")[0])

    def at(self, namespace: str) -> JobStore:
        """Other keys of the same store.

        Args:
            namespace: Prefix of the keys.
        """
        other = JobStore(self._root, namespace, self._topology, self._timeout, self._caller)
        other._fate = self._fate
        return other

    def _part(self, part: JobStore) -> JobStore:
        part._within = self, part.namespace
        part._fate = self._fate
        return part

    def record_key(self, key: str) -> None:
        """Remember a key that this rank sets, or has set by a process group."""
        if self._within is None:
            self.own_keys.add(key)
        else:
            whole, namespace = self._within
            whole.record_key(f"{namespace}/{key}")

    def count(self, key: str) -> int:
        """Add 1 to a number that all ranks count up; what it is now."""
        return int(self._reaching(lambda: self._store.add(key, 1)))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete keys, which nobody may need any more."""
        for key in list(keys):
            self._reaching(functools.partial(self._store.delete_key, key))

    def store(self, prefix: str) -> Store:
        """The keys below a prefix as a store, for a process group to be formed over it."""
        import torch.distributed as dist

        return dist.PrefixStore(prefix, self._store)

    def own_address(self) -> str | None:
        """The address of this host from which it reaches the store; `None` for a store that has none itself."""
        store = self._tcp_store()
        return None if store is None else address_towards(store.host, store.port)

    def _tcp_store(self) -> Any:
        import torch.distributed as dist

        store: Any = self._store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store if isinstance(store, dist.TCPStore) else None

    def try_get(self, key: str) -> Any | None:
        """The value of `key` if it is there already; `None` otherwise. Waits for no rank."""
        return self._reaching(lambda: self._look_up(key))

    def try_get_soon(self, key: str) -> Any | None:
        """As `try_get`, but `None` also if the store does not answer soon: for what is good to know, not needed."""
        with suppress(UnansweredError):
            return self._reaching(lambda: self._look_up(key), self._quick_caller)
        return None

    def _look_up(self, key: str) -> Any | None:
        """In one call: where it is not set `get` would wait, and it may be deleted between a `check` and a `get`."""
        told = self._store.compare_set(key, _UNSET, _UNSET)  # what is not set stays so, as it is not what is expected
        return None if told == _UNSET.encode() else _understood(key, told)

    def has(self, keys: list[str]) -> bool:
        """Whether all of these keys are set. Never waits."""
        return bool(self._reaching(lambda: self._store.check(keys)))

    def wait_get(self, key: str, publisher: str, within: float | None = None) -> Any:
        """The value of `key`, waiting for it up to the time limit, or `within` seconds.

        Raises:
            RendezvousError: It did not come. `publisher` is named in the message.
        """
        if not self._wait_for([key], within):
            waited = self._timeout if within is None else within
            raise RendezvousError(
                f"Rank {self._topology.global_rank} waited {waited:g} s for {publisher} to tell it {key!r}. "
                "Open the run on all ranks, without a rank guard around it, or raise join_timeout."
            )
        return self.try_get(key)

    def publish_own(self, key: str, value: Any) -> None:
        """Publish `value` of this rank, for those that `wait_get_all` of them."""
        self.publish(f"{key}/{self._topology.global_rank}", value)

    def try_get_all(self, key: str, within: float) -> list[Any] | None:
        """As `wait_get_all`, but gives up after `within` seconds: for what is good to know, not needed."""
        keys = self._keys_of_ranks(key)
        return self._values(keys) if self._wait_for(keys, within) else None

    def wait_get_all(self, key: str) -> list[Any]:
        """Learn what each rank published by `publish_own`, in the order of global ranks.

        Raises:
            RendezvousError: Some ranks did not come within the time limit; they are named.
        """
        keys = self._keys_of_ranks(key)
        if not self._wait_for(keys):
            missing = [rank for rank, k in enumerate(keys) if self.try_get(k) is None]
            raise RendezvousError(
                f"Rank {self._topology.global_rank} waited {self._timeout:g} s for the {key!r} of rank "
                f"{', '.join(map(str, missing))} of {self._topology.world_size}, without which "
                "the layout of ranks over nodes is unknown. Open the run on all ranks, without a rank guard around it, "
                "or raise join_timeout."
            )
        return self._values(keys)

    def _keys_of_ranks(self, key: str) -> list[str]:
        return [f"{key}/{rank}" for rank in range(self._topology.world_size)]

    def _values(self, keys: list[str]) -> list[Any]:
        return list(map(_understood, keys, self._reaching(lambda: self._store.multi_get(keys))))

    def _wait_for(self, keys: list[str], within: float | None = None) -> bool:
        """Poll with `check`: a blocking `wait` would hold the store that the training uses too."""
        deadline = time.monotonic() + (self._timeout if within is None else within)
        pause = _FIRST_PAUSE
        while not self._reaching(lambda: self._store.check(keys)):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _reaching(self, use_store: Callable[[], Any], quick_caller: TimedCaller | None = None) -> Any:
        """Use the store; with `quick_caller`, that a store does not answer is raised as `UnansweredError`.

        A connection that broke is not used again, and no other one to the same host: it does not come back, and torch
        would write a stack trace each time. So it is looked at before it is used, where it is known.
        """
        import torch.distributed as dist

        try:
            if self._fate.gone is None and self._connection is not None and is_hung_up(self._connection):
                self._fate.gone = RuntimeError("it has closed the connection")
            if self._fate.gone is not None:
                raise self._fate.gone
            return (quick_caller or self._caller).call(use_store)
        except (RuntimeError, UnansweredError) as error:  # torch's DistError family, and what older versions raise
            if quick_caller is not None and isinstance(error, UnansweredError):
                raise
            if isinstance(error, dist.DistNetworkError):
                self._fate.gone = error
            raise RendezvousError(
                f"Rank {self._topology.global_rank} cannot reach the store of the job: {error}. Its host, rank 0 or "
                "torchrun's agent, may have ended, or the network is cut off."
            ) from error


def _store_of_process_group() -> Store | None:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.group.WORLD is None:
        return None
    store = dist.group.WORLD.get_group_store()
    while isinstance(store, dist.PrefixStore):  # down to torchrun's own, which ranks without a group use
        store = store.underlying_store
    return store


def _understood(key: str, told: bytes) -> Any:
    try:
        return json.loads(told)
    except (ValueError, RecursionError) as error:
        raise RendezvousError(
            f"The job's store holds {told[:100]!r} as {key!r}, which no rank of this session has written ({error}). "
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
