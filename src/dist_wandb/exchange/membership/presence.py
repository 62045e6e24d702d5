"""Which ranks of a unit are here: each rank says so of itself in the job's store."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from dist_wandb.exchange.membership.departures import Departures
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.shared_list import SharedList

_APART = 2.0  # seconds that ranks of one start may be apart: who ends sooner waits as long for a sign of the others
_OPENED, _ACCOMPANIED = "opened", "accompanied"  # keys


class Arrival(NamedTuple):
    """What a rank publishes of itself when it comes, or wants to join.

    Args:
        member: Its index in the unit.
        global_rank: That in the job.
        node: The rank of its node; -1 where that is not known.
    """

    member: int
    global_rank: int
    node: int


def keys_of(unit: Unit) -> str:
    """Below which prefix of a session's keys those of a unit are."""
    return f"unit/{unit.name}"


def say_opened(keys: JobStore, unit: Unit) -> None:
    """Say that this rank opens its session, for others not to take themselves for the only one that does.

    Args:
        keys: Those of the unit.
        unit: The unit, seen from this rank.
    """
    if keys.claim(_OPENED, unit.index) != unit.index:
        keys.publish(_ACCOMPANIED, 1)


def is_accompanied(keys: JobStore) -> bool:
    """Whether two ranks of a unit, or more, have opened their sessions."""
    return keys.has([_ACCOMPANIED])


class Presence:
    """One rank's view of which ranks are here.

    Args:
        unit: The unit, seen from this rank.
        keys: Keys of the unit in the job's store.

    Attributes:
        global_ranks: Indices in the job of ranks that were met and may be elsewhere than the unit has them, by index.
        nodes: Ranks of their nodes, -1 where not known, of ranks that have come or want to join.
        departures: Which ranks are gone.
    """

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        self.global_ranks: dict[int, int] = {unit.index: unit.global_rank}
        self.nodes: dict[int, int] = {}
        self.departures: Departures = Departures(unit, keys)
        self._unit = unit
        self._keys = keys
        self._here: set[int] = set()  # as far as it was read
        self._arrivals = SharedList(keys, "here")
        self._began = time.monotonic()
        self._is_accompanied = False

    def arrive(self) -> bool:
        """Say that this rank is here; whether it is the last one."""
        say_opened(self._keys, self._unit)
        return self._arrivals.append_one_of(self.own_arrival(), self._unit.size)

    def own_arrival(self) -> Arrival:
        """What others learn of this rank."""
        node = self._keys.topology.node_rank
        return Arrival(self._unit.index, self._unit.global_rank, -1 if node is None else node)

    def learn(self, arrival: Arrival) -> int:
        """Keep what a rank has published of itself; its index in the unit."""
        self.global_ranks[arrival.member], self.nodes[arrival.member] = arrival.global_rank, arrival.node
        return arrival.member

    def are_all_here(self) -> bool:
        """Whether all ranks of the unit have come; reads who they are."""
        self._read_arrivals()
        return len(self._here) == self._unit.size

    def here(self) -> set[int]:
        """Ranks that have come and are not gone."""
        self._read_arrivals()
        return self._here - self.gone(self._here)

    def has_others(self) -> bool:
        """Whether other ranks are here."""
        return bool(self.here() - {self._unit.index})

    def _read_arrivals(self) -> None:
        self._here.update(self.learn(Arrival(*arrival)) for arrival in self._arrivals.news())

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Those of some ranks that have said that they are gone."""
        return self.departures.among(ranks)

    def absent(self, members: Iterable[int]) -> set[int]:
        """Ranks that should take part but do not: neither members nor finished, as far as this rank knows."""
        return set(range(self._unit.size)) - set(members) - self.departures.left

    @property
    def waited(self) -> float:
        """Seconds since this rank began to wait for the others."""
        return time.monotonic() - self._began

    def is_only_one(self, within: float) -> bool:
        """Whether no other rank has opened a session, though it has had the time to.

        Args:
            within: How long ranks that have not opened theirs are waited for, in seconds.
        """
        if not self._is_accompanied:
            self._is_accompanied = is_accompanied(self._keys)
        return not self._is_accompanied and self.waited >= min(within, _APART)

    def why_absent(self, index: int, generation: Generation) -> str:
        """Why a rank is not in the first generation of this one."""
        departure = self.departures.known.get(index)
        if departure is not None:
            how = "failed" if departure.how == "failed" else "ended its session"
            return f"{how} before rank {self._unit.global_rank} began"
        if index in generation.lost:
            return "took no part"
        return f"did not open a session within {round(self.waited, 1):g} s"

    def global_rank(self, index: int) -> int:
        """Index in the job of a rank of the unit; as `Unit.global_rank_of` has it, where nothing else is known."""
        departure = self.departures.known.get(index)
        if index in self.global_ranks or departure is None:
            return self.global_ranks.get(index, self._unit.global_rank_of(index))
        return departure.global_rank
