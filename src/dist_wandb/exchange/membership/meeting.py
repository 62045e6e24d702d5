"""Where the members of a group find each other to form it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.polling import look_until
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.exchange.transport.layout import Place
from dist_wandb.store.addresses import address_among
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval
from dist_wandb.store.shared_list import SharedList
from dist_wandb.topology.launch import job_setting

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_FOR_LEAVING = 0.2  # seconds between two looks whether a member has broken off, or is gone


class Met(NamedTuple):
    """What a member publishes when it comes to form a group.

    Args:
        member: Its index in the unit.
        address: From where it is reached; `None` if it does not know.
    """

    member: int
    address: str | None


class Meeting:
    """One rank's part in meeting the other members of its groups.

    Args:
        keys: Keys of the unit in the job's store.
        index: Index of this rank in the unit.
        is_broken: Whether some member found a generation broken.
        is_stopped: Whether waiting is to end at once.
    """

    def __init__(
        self,
        keys: JobStore,
        index: int,
        is_broken: Callable[[Generation], bool],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._keys = keys
        self._index = index
        self._is_broken = is_broken
        self._is_stopped = is_stopped
        self._address: str | None = None
        self._addresses: list[str | None] = []  # of all members of the group that has met last

    def wait(self, generation: Generation, place: Place, within: float) -> bool:
        """Wait until all members have come to form their group: forming it cannot be broken off.

        Each says from where it is reached, and the last one publishes that all have come, with their addresses. So a
        member looks at one key, however many they are.

        Args:
            generation: The generation that begins.
            place: The place of this rank in the group.
            within: How long to wait, in seconds.

        Returns:
            Whether all of them have come. One that is going is not waited for.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        if self._address is None:
            self._address = self._keys.connection.own_address()
        members, name = len(place.members), f"met/{generation.number}/{place.name}"
        met = SharedList(self._keys, name)
        is_last = met.append_one_of(Met(self._index, self._address), members)
        look_for_leaving = Interval(interval(_LOOK_FOR_LEAVING, len(generation.members)))

        def addresses_or_nothing() -> list[str | None] | None:
            if is_last:
                met.news()
            come = {one.member: one.address for one in (Met(*entry) for entry in met.values)}
            if len(come) >= members:
                self._keys.publish(f"{name}/all", list(dict.fromkeys(come.values())))
            found: list[str | None] | None = self._keys.try_get(f"{name}/all")
            if found is None and look_for_leaving.is_over(time.monotonic()):
                return [] if self._is_broken(generation) else None
            return found

        ranks = len(generation.members)
        self._addresses = look_until(addresses_or_nothing, within, self._is_stopped, ranks) or []
        return bool(self._addresses)

    def address(self) -> str | None:
        """The address by which the members that have met reach this rank; `None` to leave it to gloo."""
        if job_setting("GLOO_SOCKET_IFNAME"):
            return None
        return address_among(self._address, self._addresses)

    def store_of(self, generation: Generation, place: Place) -> Store:
        """Where the members of a group find each other for their process group."""
        group = f"group/{generation.number}/{place.name}"
        self._keys.record_key(f"{group}/0/{place.position}")  # where gloo puts its address
        return self._keys.store(group)
