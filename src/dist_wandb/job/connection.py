"""A connection to the job's store: calls with a timeout, no calls once its host is gone, and its addresses.

A connection that the host has closed is not used again, because torch would write a stack trace. A dedicated connection
is checked for that before each call. Before another connection is made (`duplicate`), the first one is tested, because
torch takes minutes to fail to connect to a store that is gone.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dist_wandb.errors import RendezvousError
from dist_wandb.job.timed_caller import TimedCaller, UnansweredError

if TYPE_CHECKING:
    from torch.distributed import Store

_ANY_PORT = 9  # nothing is sent to it
_T = TypeVar("_T")
_QUICK_TIMEOUT = 1.0  # seconds to wait for values that are not needed now
_LEAST_PATIENCE = 2.0  # minimum timeout of the store, in seconds, even if other ranks are waited for less


def address_towards(host: str, port: int = _ANY_PORT) -> str | None:
    """Return the address from which this host reaches another one; `None` if there is no route. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(place)  # only selects a route
                return str(probe.getsockname()[0])
        except OSError:  # noqa: PERF203  # there are only a few
            continue
    return None


def address_among(own: str | None, published: Collection[str | None]) -> str | None:
    """Return the address at which other ranks can reach this rank; `None` if gloo's own choice is sufficient.

    By default, gloo uses the address that the host's own name resolves to. On many hosts that is a loopback address, or
    none. Training with NCCL works there, so the exchange has to work as well. `own` is the address from which this rank
    reaches the job's store, and `published` has those of all ranks; `None` is unknown. If rank 0 hosts the store and
    reaches it from 127.0.1.1, and rank 1 has published 10.0.0.2, the result on rank 0 is its address towards 10.0.0.2,
    such as 10.0.0.1.
    """
    if own is None or len(set(published)) == 1:
        return None
    if not _is_loopback(own):
        return own
    others = sorted(address for address in published if address is not None and not _is_loopback(address))
    return address_towards(others[0]) if others else None


def connections_to(port: int) -> set[int]:
    """Return file descriptors of this process's connections to a port of any host; none if they cannot be listed."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208  # names are numbers, not paths
    except OSError:
        return set()
    found = set[int]()
    for descriptor in descriptors:
        with _borrowed(descriptor) as connection, suppress(OSError):
            if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
                found |= {descriptor} if connection.getpeername()[1] == port else set()
    return found


def is_hung_up(descriptor: int) -> bool:
    """Return whether the other side is known to have closed a connection. Does not consume received data."""
    with _borrowed(descriptor) as connection:
        try:
            return connection is not None and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a socket object for a descriptor; `None` if it is not a socket."""
    connection = None
    with suppress(OSError):
        connection = socket.socket(fileno=descriptor) if stat.S_ISSOCK(os.fstat(descriptor).st_mode) else None
    try:
        yield connection
    finally:
        if connection is not None:
            connection.detach()


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class StoreConnection:
    """One rank's connection to the job's store. Without a `caller`, calls get the timeout for ranks, at least 2 s."""

    def __init__(
        self,
        store: Store,
        rank: int,
        timeout: float,
        caller: TimedCaller | None = None,
        gone: list[RuntimeError] | None = None,
    ) -> None:
        self.root = store
        self.descriptor: int | None = None  # of the socket, if this is a duplicate with a connection of its own
        self._rank, self._pid = rank, os.getpid()
        self._timeout = timeout  # for other ranks, in seconds
        self._caller = caller or TimedCaller(max(timeout, _LEAST_PATIENCE))
        self._quick_caller = TimedCaller(_QUICK_TIMEOUT)
        self._gone = [] if gone is None else gone  # what shows that the store's host has ended, for all connections

    def call(self, use_store: Callable[[], _T], *, soon: bool = False) -> _T:
        """Call the store; raise RendezvousError if it is gone or slow; if `soon`, UnansweredError after a second."""
        import torch.distributed as dist

        try:
            if not self._gone and os.getpid() != self._pid:  # two processes would read each other's answers
                self._gone.append(RuntimeError("this process is a fork, which has none of its own"))
            if not self._gone and self.descriptor is not None and is_hung_up(self.descriptor):
                self._gone.append(RuntimeError("it has closed the connection"))
            if self._gone:  # it never returns, and torch would write a stack trace each time
                raise self._gone[0]
            return (self._quick_caller if soon else self._caller).call(use_store)
        except (RuntimeError, UnansweredError) as error:  # torch's DistError family, and errors of older versions
            if soon and isinstance(error, UnansweredError):
                raise
            if isinstance(error, dist.DistNetworkError):
                self._gone.append(error)
            raise RendezvousError(
                f"Rank {self._rank} cannot reach the store of the job: {error}. Its host, rank 0 or "
                "torchrun's agent, may have ended, or the network is cut off."
            ) from error

    def duplicate(self, store: Store, caller: TimedCaller | None) -> StoreConnection:
        # `store` is the store with a prefix of its keys, which the new connection has as well. Errors as for `call`.
        self.call(lambda: store.check(["-"]))  # fails immediately if the store is gone; connecting takes minutes
        port = getattr(self._tcp_store(), "port", 0)
        clone = store.clone  # type: ignore[attr-defined]  # missing in the stubs
        before = connections_to(port)
        duplicate = StoreConnection(self.call(clone), self._rank, self._timeout, caller, self._gone)
        new = connections_to(port) - before
        if len(new) == 1:  # otherwise another thread has connected at the same time
            (duplicate.descriptor,) = new
        return duplicate

    def own_address(self) -> str | None:
        store = self._tcp_store()
        return None if store is None else address_towards(store.host, store.port)

    def _tcp_store(self) -> Any:
        import torch.distributed as dist

        store: Any = self.root
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store if isinstance(store, dist.TCPStore) else None
