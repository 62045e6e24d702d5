"""A connection to the job's store: calls with a timeout, and no calls once its host is gone.

A connection that the host has closed is not used again, because torch would write a stack trace. A dedicated connection
is checked for that before each call. Before another connection is made (`duplicate`), the first one is tested, because
torch takes minutes to fail to connect to a store that is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dist_wandb.errors import RendezvousError
from dist_wandb.store.addresses import address_towards, connections_to, is_hung_up
from dist_wandb.store.timed_caller import TimedCaller, UnansweredError

if TYPE_CHECKING:
    from torch.distributed import Store

_T = TypeVar("_T")
_QUICK_TIMEOUT = 1.0  # seconds to wait for values that are not needed now
_LEAST_PATIENCE = 2.0  # minimum timeout of the store, in seconds, even if other ranks are waited for less


class _State:
    """What all connections of a session to the job's store share."""

    gone: RuntimeError | None = None  # shows that the store's host has ended


class StoreConnection:
    """One rank's connection to the store of the job.

    `caller` limits the time of calls. Without one, that is the timeout for other ranks, but at least two seconds.
    """

    def __init__(
        self, store: Store, rank: int, timeout: float, caller: TimedCaller | None = None, state: _State | None = None
    ) -> None:
        self.root = store
        self.descriptor: int | None = None  # of the socket, if this is a duplicate with a connection of its own
        self._rank = rank
        self._timeout = timeout  # for other ranks, in seconds
        self._caller = caller or TimedCaller(max(timeout, _LEAST_PATIENCE))
        self._quick_caller = self._caller.at_most(_QUICK_TIMEOUT)
        self._state = state or _State()

    def call(self, use_store: Callable[[], _T], *, soon: bool = False) -> _T:
        """Call the store; raise RendezvousError if it is gone, or does not answer in time.

        With `soon`, it has one second, and an UnansweredError is raised after that.
        """
        import torch.distributed as dist

        try:
            if self._state.gone is None and self.descriptor is not None and is_hung_up(self.descriptor):
                self._state.gone = RuntimeError("it has closed the connection")
            if self._state.gone is not None:  # it never returns, and torch would write a stack trace each time
                raise self._state.gone
            return (self._quick_caller if soon else self._caller).call(use_store)
        except (RuntimeError, UnansweredError) as error:  # torch's DistError family, and errors of older versions
            if soon and isinstance(error, UnansweredError):
                raise
            if isinstance(error, dist.DistNetworkError):
                self._state.gone = error
            raise RendezvousError(
                f"Rank {self._rank} cannot reach the store of the job: {error}. Its host, rank 0 or "
                "torchrun's agent, may have ended, or the network is cut off."
            ) from error

    def duplicate(self, store: Store, caller: TimedCaller | None) -> StoreConnection:
        """Return a dedicated connection to the same store if torch can make one (2.8 and newer); otherwise reuse this.

        `store` is the store with a prefix of its keys, which the new connection has as well. Errors as for `call`.
        """
        clone = getattr(store, "clone", None)
        new: set[int] = set()
        if clone is not None:
            self.call(lambda: store.check(["-"]))  # fails immediately if the store is gone; connecting takes minutes
            port = getattr(self._tcp_store(), "port", 0)
            before = connections_to(port)
            store = self.call(clone)
            new = connections_to(port) - before
        duplicate = StoreConnection(store, self._rank, self._timeout, caller, self._state)
        if len(new) == 1:  # otherwise another thread has connected at the same time
            (duplicate.descriptor,) = new
        return duplicate

    def own_address(self) -> str | None:
        """Return the address from which this host reaches the store; `None` for a store without an address."""
        store = self._tcp_store()
        return None if store is None else address_towards(store.host, store.port)

    def _tcp_store(self) -> Any:
        import torch.distributed as dist

        store: Any = self.root
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store if isinstance(store, dist.TCPStore) else None
