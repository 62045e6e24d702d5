"""Where the members of a generation find each other to form a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.membership.polling import look_until
from dist_wandb.exchange.membership.presence import Presence
from dist_wandb.store.addresses import address_among
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.launch import job_setting

if TYPE_CHECKING:
    from torch.distributed import Store


class Meeting:
    """One rank's part in meeting the other members.

    Args:
        keys: Keys of the unit in the job's store.
        index: Index of this rank in the unit.
        presence: Which ranks are gone.
        is_broken: Whether some member found a generation broken.
        is_stopped: Whether waiting is to end at once.
    """

    def __init__(
        self,
        keys: JobStore,
        index: int,
        presence: Presence,
        is_broken: Callable[[Generation], bool],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._keys = keys
        self._index = index
        self._presence = presence
        self._is_broken = is_broken
        self._is_stopped = is_stopped
        self._address: str | None = None

    def wait(self, generation: Generation, within: float) -> bool:
        """Wait until all members have come to form their group: forming it cannot be broken off.

        Args:
            generation: The generation that begins.
            within: How long to wait, in seconds.

        Returns:
            Whether all of them have come. One that is going is not waited for.

        Raises:
            Stopped: Waiting was to end.
            RendezvousError: The store is gone.
        """
        if self._address is None:
            self._address = self._keys.connection.own_address()
        self._keys.publish(f"met/{generation.number}/{self._index}", self._address)
        keys = _keys_of(generation)

        def is_decided() -> bool:
            return self._keys.has(keys) or self._is_broken(generation) or bool(self._presence.gone(generation.members))

        is_met = look_until(lambda: is_decided() or None, within, self._is_stopped)
        return bool(is_met) and self._keys.has(keys)

    def address(self, generation: Generation) -> str | None:
        """The address by which the other members, which have met, reach this rank; `None` to leave it to gloo."""
        if job_setting("GLOO_SOCKET_IFNAME"):
            return None
        return address_among(self._address, [self._keys.try_get(key) for key in _keys_of(generation)])

    def store_of(self, generation: Generation) -> Store:
        """Where the members of a generation find each other for their process group."""
        group = f"group/{generation.number}"
        self._keys.record_key(f"{group}/0/{generation.members.index(self._index)}")  # where gloo puts its address
        return self._keys.store(group)


def _keys_of(generation: Generation) -> list[str]:
    return [f"met/{generation.number}/{member}" for member in generation.members]
