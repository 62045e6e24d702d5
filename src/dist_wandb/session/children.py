"""Rows from processes that this rank has started: pickled or forked, a session sends its rows to the first process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dist_wandb.relay.relay import Relay
from dist_wandb.relay.remote_session import RemoteSession

if TYPE_CHECKING:
    from dist_wandb.topology.model import Topology


class Children:
    """The processes that hold a copy of this process's session. Their rows are passed to `deliver`."""

    def __init__(
        self, deliver: Callable[..., None], topology: Topology, metadata: Callable[[bool], dict[str, Any]]
    ) -> None:
        self._pid = os.getpid()
        self._topology = topology
        self._metadata = metadata  # returns the run's metadata for them; for `False`, without waiting for other ranks
        self._relay = Relay(deliver)
        self._for_forks: dict[str, Any] = {}
        self._remote: RemoteSession | None = None

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the session's."""
        return os.getpid() != self._pid

    def remote(self) -> RemoteSession:
        """Return the stand-in for the session in a fork of its process."""
        if self._remote is None:
            self._remote = RemoteSession(self._relay.address, self._topology, self._for_forks)
        return self._remote

    def reduced(self) -> tuple[Any, ...]:
        """Reduce the session for pickle: in another process, such as a spawned worker, it sends rows to this one."""
        if self.is_fork:
            return self.remote().__reduce__()
        return RemoteSession, (self._relay.open(), self._topology, self._metadata(True))

    def prepare_fork(self) -> None:
        """Prepare to receive rows from a fork of this process."""
        if not self.is_fork:
            self._relay.open()
            self._for_forks = self._metadata(False)

    def after_fork(self) -> None:
        """In the fork, close what only the session's own process may hold."""
        self._relay.after_fork()

    def continue_for(self, earlier: Children) -> None:
        """Take over the processes that hold a copy of an earlier session, which continues as this one."""
        own, self._relay = self._relay, earlier._relay
        self._relay.deliver, earlier._relay = own.deliver, own

    def close(self, *, failed: bool) -> None:
        """Receive the rows that they have logged until now, and no more; if `failed`, not even these."""
        if not self.is_fork:
            self._relay.close(failed=failed)
