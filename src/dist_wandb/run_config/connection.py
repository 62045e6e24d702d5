"""The connection through which the configs of a job are exchanged."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from dist_wandb.errors import RendezvousError
from dist_wandb.run_config.messages import checked
from dist_wandb.store.timed_caller import STORE_PATIENCE, TimedCaller

if TYPE_CHECKING:
    from dist_wandb.settings.limits import Limits
    from dist_wandb.store.job_store import JobStore
    from dist_wandb.topology.model import Topology

_T = TypeVar("_T")

_LEAST_LIMIT = 0.5  # seconds that the store gets to answer


class Connection:
    """A separate connection to the job's store, so that it is never in use by another thread of the exchange."""

    def __init__(self, limits: Limits, topology: Topology) -> None:
        self.topology = topology
        self.rank: int = topology.global_rank
        self.join_timeout: float = limits.join_timeout  # seconds
        # Returns the job's store, which may appear only after this rank's session was opened.
        self.find: Callable[[], JobStore | None] = lambda: None
        # Waits until a query finds that the primary has opened its run, as long as reads may wait.
        self.await_primary: Callable[[Callable[[], bool]], None] = lambda _: None
        # The exchange's thread uses it, too: a stalled store must not make this rank look dead to the others.
        self._limit = max(_LEAST_LIMIT, min(STORE_PATIENCE, limits.peer_timeout / 2))
        self._job_store: JobStore | None = None
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_usable(self) -> bool:
        """Whether other ranks can be reached; not in a fork, where the connection belongs to the parent."""
        return self.topology.world_size > 1 and not self._is_closed and os.getpid() == self._pid

    def store(self) -> JobStore | None:
        """Return the job's store; `None` while there is none."""
        if self._job_store is None:
            self._job_store = self.open(TimedCaller(self._limit))
        return self._job_store

    def open(self, caller: TimedCaller | None = None) -> JobStore | None:
        """Open a further connection to the job's store; `None` while there is none."""
        found = self.find()
        return None if found is None else found.beside("config_sync", caller)

    def try_get(self, key: str, kind: type[_T]) -> _T | None:
        """Return the message of a key; `None` if it is not set, or there is no store yet.

        Raises `ConfigurationError` if it is not of this kind.
        """
        job_store = self.store()
        message = None if job_store is None else job_store.try_get(key)
        return None if message is None else checked(message, kind, key)

    def is_first(self, key: str) -> bool:
        """Claim a key. Return whether no other rank has claimed it before; `True` if that cannot be determined."""
        with suppress(RendezvousError):
            job_store = self.store() if self.is_usable else None
            return job_store is None or job_store.claim(key, self.rank) == self.rank
        return True

    def close(self) -> None:
        """Drop the connection, which cannot be used afterwards."""
        self._is_closed = True
        self._job_store, self.find = None, lambda: None  # breaks a reference cycle
