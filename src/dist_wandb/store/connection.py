"""One connection to the job's store: calls with a time limit, and none once its host is gone.

A connection that the host has closed is not used again, because torch would write a stack trace; where it is our own,
that is looked at before each use. Before another one is made (`duplicate`), the first is tried: torch tries for minutes
to connect to a store that is gone.
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
_GLANCE = 1.0  # seconds
_LEAST_PATIENCE = 2.0  # seconds that the store gets to answer, however short others are waited for


class _Fate:
    """What a session's connections to the job's store share.

    Attributes:
        gone: Why the store's host is taken to have ended, once it is.
    """

    gone: RuntimeError | None = None


class StoreConnection:
    """A connection to the store of the job, as one rank uses it.

    Args:
        store: A store that all ranks of the job reach.
        rank: This rank, for messages.
        timeout: How long other ranks are waited for, in seconds.
        caller: Limits the time of the store's answers; `None` for `timeout`, though not less than two seconds.
        fate: That of the connection of which this one is a duplicate.

    Attributes:
        root: The store, as given.
        descriptor: That of its socket, where the connection is our own.
    """

    def __init__(
        self, store: Store, rank: int, timeout: float, caller: TimedCaller | None = None, fate: _Fate | None = None
    ) -> None:
        self.root = store
        self.descriptor: int | None = None
        self._rank = rank
        self._timeout = timeout
        self._caller = caller or TimedCaller(max(timeout, _LEAST_PATIENCE))
        self._quick_caller = self._caller.at_most(_GLANCE)
        self._fate = fate or _Fate()

    def call(self, use_store: Callable[[], _T], *, soon: bool = False) -> _T:
        """Use the store within the time limit.

        Args:
            use_store: Uses it.
            soon: Whether it is to answer within a second.

        Raises:
            UnansweredError: It is to answer soon, and does not.
            RendezvousError: It is gone, or does not answer.
        """
        import torch.distributed as dist

        try:
            if self._fate.gone is None and self.descriptor is not None and is_hung_up(self.descriptor):
                self._fate.gone = RuntimeError("it has closed the connection")
            if self._fate.gone is not None:  # it does not come back, and torch would write a stack trace each time
                raise self._fate.gone
            return (self._quick_caller if soon else self._caller).call(use_store)
        except (RuntimeError, UnansweredError) as error:  # torch's DistError family, and what older versions raise
            if soon and isinstance(error, UnansweredError):
                raise
            if isinstance(error, dist.DistNetworkError):
                self._fate.gone = error
            raise RendezvousError(
                f"Rank {self._rank} cannot reach the store of the job: {error}. Its host, rank 0 or "
                "torchrun's agent, may have ended, or the network is cut off."
            ) from error

    def duplicate(self, store: Store, caller: TimedCaller | None) -> StoreConnection:
        """A connection of its own to the same store, where torch can make one (2.8 and newer); else this one's.

        Args:
            store: The store with a prefix of its keys; `root` of the new connection has it as well.
            caller: Limits the time of its answers, as in the constructor.

        Raises:
            RendezvousError: The store is gone, or does not answer.
        """
        clone = getattr(store, "clone", None)
        new: set[int] = set()
        if clone is not None:
            self.call(
                lambda: store.check(["-"])
            )  # a store that is gone fails this at once, and a connection in minutes
            port = getattr(self._tcp_store(), "port", 0)
            before = connections_to(port)
            store = self.call(clone)
            new = connections_to(port) - before
        duplicate = StoreConnection(store, self._rank, self._timeout, caller, self._fate)
        if len(new) == 1:  # otherwise another thread has made one at the same time
            (duplicate.descriptor,) = new
        return duplicate

    def own_address(self) -> str | None:
        """The address of this host from which it reaches the store; `None` for a store that has none itself."""
        store = self._tcp_store()
        return None if store is None else address_towards(store.host, store.port)

    def _tcp_store(self) -> Any:
        import torch.distributed as dist

        store: Any = self.root
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return store if isinstance(store, dist.TCPStore) else None
