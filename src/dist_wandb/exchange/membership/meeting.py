"""Waiting at the job's store, until stopped: for a value, and for the members of a group before they form it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from dist_wandb.exchange.membership.generations import Generation, GenerationStore
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.exchange.transport.layout import GroupLayout
from dist_wandb.store.connection import address_among
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval, poll
from dist_wandb.store.shared_list import SharedList
from dist_wandb.topology.launch import job_setting

if TYPE_CHECKING:
    from torch.distributed import Store

_T = TypeVar("_T")
_LONGEST_PAUSE = 0.05  # seconds between two polls of the store at first, and between two checks whether to stop
_BROKEN_CHECK_INTERVAL = 0.2  # seconds between two checks whether the generation is broken


class Stopped(Exception):  # noqa: N818  # not an error: it was requested
    """Waiting was stopped."""


class Over(Exception):  # noqa: N818  # not an error either: this rank is late
    """The other ranks have ended their sessions, or the primary could not open its run, for the reason given."""


class Moved(Exception):  # noqa: N818  # not an error either: the ranks continue in another session
    """The primary has not opened a session. Another rank becomes the primary of another session."""

    def __init__(self, primary: int) -> None:
        super().__init__(primary)
        self.primary = primary  # its index in the unit


def poll_until_stopped(
    query: Callable[[], _T | None],
    within: float,
    is_stopped: Callable[[], bool],
    ranks: int = 1,
    is_urgent: Callable[[], bool] = lambda: False,
) -> _T | None:
    """Poll like `store.polling.poll`; if `is_stopped`, raise Stopped; if `is_urgent`, without the rest of the pause."""

    def sleep(seconds: float) -> None:
        until = time.monotonic() + seconds
        while not is_stopped() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_PAUSE))
            if is_urgent():
                return
        if is_stopped():
            raise Stopped

    found = poll(query, within, _LONGEST_PAUSE, ranks, sleep)
    if found is None and is_stopped():
        raise Stopped
    return found


class Meeting:
    """Waits for the other members of a rank's groups."""

    def __init__(self, keys: JobStore, rank: int, generations: GenerationStore, is_stopped: Callable[[], bool]) -> None:
        self._keys = keys
        self._rank = rank  # in the unit
        self._generations = generations
        self._is_stopped = is_stopped
        self.missing: frozenset[int] = frozenset()  # of its lowest group, if they did not come in time
        self._address: str | None = None
        self._addresses: list[str | None] = []  # of all members of the latest group

    def wait(self, generation: Generation, group: GroupLayout, within: float) -> bool:
        """Wait until all members are ready to form their group, because forming it cannot be interrupted.

        Each member publishes its address (`None` if unknown), and the last one those of all: so each polls one key.
        Returns whether all are ready: not after `within` seconds, or if the generation is broken already.
        """
        if self._address is None:
            self._address = self._keys.connection.own_address()
        members, name = len(group.members), f"met/{generation.number}/{group.name}"
        met = SharedList(self._keys, name)
        is_last = met.append_one_of([self._rank, self._address], members)
        broken_check = Interval(interval(_BROKEN_CHECK_INTERVAL, len(generation.members)))

        def addresses_or_nothing() -> list[str | None] | None:
            if is_last:
                met.read_new()
            addresses_of = dict(met.values)
            if len(addresses_of) >= members:
                self._keys.publish(f"{name}/all", list(dict.fromkeys(addresses_of.values())))
            addresses: list[str | None] | None = self._keys.try_get(f"{name}/all")
            if addresses is None and broken_check.is_over(time.monotonic()):
                return [] if self._generations.is_broken(generation) else None
            return addresses

        ranks = len(generation.members)
        self.missing = frozenset()
        found = poll_until_stopped(addresses_or_nothing, within, self._is_stopped, ranks)
        if found is None and not group.level:  # those of higher groups may still be waiting in theirs
            met.read_new()
            self.missing = frozenset(group.members) - dict(met.values).keys()
        self._addresses = found or []
        return bool(self._addresses)

    def address(self) -> str | None:
        """Return the address at which the members can reach this rank; `None` to let gloo choose it."""
        if job_setting("GLOO_SOCKET_IFNAME"):
            return None
        return address_among(self._address, self._addresses)

    def store_of(self, generation: Generation, group: GroupLayout) -> Store:
        """Return the store through which the members of a group connect."""
        prefix = f"group/{generation.number}/{group.name}"
        self._keys.record_key(f"{prefix}/0/{group.group_rank}")  # gloo writes its address there
        return self._keys.store(prefix)
