"""Which ranks of a unit are here, and which are gone, and how: each rank says so of itself in the job's store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore

_APART = 2.0  # seconds that ranks of one start may be apart: who ends sooner waits as long for a sign of the others
_OPENED, _ACCOMPANIED = "opened", "accompanied"  # keys


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
        left: Ranks that are gone because they had finished.
        undelivered: Ranks that are gone likewise, but before the others knew all that they had logged.
        global_ranks: Indices in the job of ranks that have been met, by their index in the unit.
    """

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        self.left: set[int] = set()
        self.undelivered: set[int] = set()
        self.global_ranks: dict[int, int] = {unit.index: unit.global_rank}
        self._unit = unit
        self._keys = keys
        self._gone: dict[int, str] = {}  # how each has gone that has said so
        self._began = time.monotonic()
        self._is_accompanied = False

    def arrive(self) -> None:
        """Say that this rank is here."""
        say_opened(self._keys, self._unit)
        self._keys.publish(f"here/{self._unit.index}", self._unit.global_rank)

    def leave(self, *, failed: bool, delivered: bool) -> None:
        """Say that this rank is gone.

        Args:
            failed: Whether it has failed.
            delivered: Whether the others know all that it has logged.
        """
        how = "failed" if failed else "finished" if delivered else "undelivered"
        self._keys.publish(f"gone/{self._unit.index}", how)
        self._keys.publish("gone", 1)

    def are_all_here(self) -> bool:
        """Whether all ranks of the unit have come."""
        return self._keys.has([f"here/{index}" for index in range(self._unit.size)])

    def here(self) -> set[int]:
        """Ranks that have come and are not gone."""
        everyone = range(self._unit.size)
        here = {index for index in everyone if self._is_here(index)}
        return here - self.gone(everyone)

    def has_others(self) -> bool:
        """Whether other ranks are here."""
        others = set(range(self._unit.size)) - {self._unit.index}
        return any(map(self._is_here, others - self.gone(others)))

    def _is_here(self, index: int) -> bool:
        return self._keys.has([f"here/{index}"])

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Those of some ranks that have said that they are gone."""
        ranks = set(ranks)
        if self._keys.has(["gone"]):  # most ranks go when all do
            for index in ranks - self._gone.keys():
                how = self._keys.try_get(f"gone/{index}")
                if how is not None:
                    self._gone[index] = how
                if how == "finished":
                    self.left.add(index)
                if how == "undelivered":
                    self.undelivered.add(index)
        return ranks & self._gone.keys()

    def absent(self, members: Iterable[int]) -> set[int]:
        """Ranks that should take part but do not: neither members nor finished."""
        outside = set(range(self._unit.size)) - set(members)
        self.gone(outside)
        return outside - self.left

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

    def why_absent(self, index: int) -> str:
        """Why a rank is not in the first generation of this one."""
        if self.gone([index]):
            how = "failed" if self._gone[index] == "failed" else "ended its session"
            return f"{how} before rank {self._unit.global_rank} began"
        if self._is_here(index):
            return "does not take part"
        return f"did not open a session within {round(self.waited, 1):g} s"

    def learn_ranks(self, members: Iterable[int], ranks: Sequence[int]) -> None:
        """Keep the indices in the job of some ranks."""
        self.global_ranks.update(zip(members, ranks, strict=True))

    def global_rank(self, index: int) -> int:
        """Index in the job of a rank of the unit, from the store if need be; that in the unit where it is not known."""
        if index not in self.global_ranks:
            stored = self._keys.try_get(f"here/{index}")
            if stored is None:
                return index
            self.global_ranks[index] = stored
        return self.global_ranks[index]
