"""The ranks of a unit that have arrived, and those that are gone. Each rank publishes both in the job's store."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dist_wandb.exchange.membership.generations import Checkpoint, CheckpointSummary, Departure, Generation
from dist_wandb.exchange.protocol.pacing import Interval
from dist_wandb.settings.plan import Unit
from dist_wandb.store.job_store import JobStore
from dist_wandb.store.polling import interval
from dist_wandb.store.shared_list import SharedList

APART = 2.0  # seconds that a rank waits at least for others: the ranks of a job do not start at the same time
_POLL_INTERVAL = 0.5  # seconds between two polls in `Departures.is_gone`
_OPENED = "opened"  # list of the ranks that have opened a session


class Arrival(NamedTuple):
    """The entry that a rank publishes when it arrives, or requests to join."""

    member: int  # its index in the unit
    global_rank: int
    node: int  # its node rank; -1 if unknown


class DepartureRecord(NamedTuple):
    """The record that a rank publishes when it leaves."""

    member: int  # its index in the unit
    how: str  # as in `Departure`
    global_rank: int
    number: int | None  # of its last generation; `None` if it was in none
    round: int  # as in `CheckpointSummary`


class Departures:
    """The departed ranks, as far as this rank has read their records."""

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        self.known: dict[int, Departure] = {}  # by index in the unit
        self.summaries: dict[int, dict[int, CheckpointSummary]] = {}  # of their last checkpoints, by generation
        self._unit = unit
        self._entries = SharedList(keys, "gone")
        self._next_poll = Interval(interval(_POLL_INTERVAL, unit.size))

    @property
    def left(self) -> set[int]:
        """Ranks that have finished, after they delivered everything."""
        return {index for index, departure in self.known.items() if departure.how == "finished"}

    @property
    def undelivered(self) -> set[int]:
        """Ranks that have finished before the others had received everything that they logged."""
        return {index for index, departure in self.known.items() if departure.how == "undelivered"}

    def leave(self, *, failed: bool, delivered: bool, number: int | None, checkpoint: Checkpoint) -> None:
        """Publish that this rank is gone; `number` is that of its generation, if it was in one."""
        how = "failed" if failed else "finished" if delivered else "undelivered"
        unit = self._unit
        self._entries.append(DepartureRecord(unit.index, how, unit.global_rank, number, checkpoint.round))

    def among(self, ranks: Iterable[int]) -> set[int]:
        """Return which of some ranks have published their departure. Reads new records."""
        for entry in self._entries.read_new():
            record = DepartureRecord(*entry)
            self.known[record.member] = Departure(record.how, record.global_rank)
            if record.number is not None:
                summary = CheckpointSummary(record.member, record.round)
                self.summaries.setdefault(record.number, {})[record.member] = summary
        return self.known.keys() & set(ranks)

    def are_gone(self, ranks: Collection[int]) -> bool:
        """Return whether all of some ranks have published their departure."""
        return self._entries.count() >= len(ranks) and self.among(ranks) == set(ranks)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has published its departure. Polls the store at intervals only."""
        if self._next_poll.is_over(time.monotonic()):
            self.among([rank])
        return rank in self.known

    def learn(self, departures: Mapping[int, Departure]) -> None:
        """Add departures that other ranks have read."""
        self.known.update(departures)


def keys_of(unit: Unit) -> str:
    """Return the prefix of a unit's keys among the keys of a session."""
    return f"unit/{unit.name}"


def publish_opened(keys: JobStore, unit: Unit) -> None:
    """Publish that this rank opens its session, so that the others wait for it."""
    SharedList(keys, _OPENED).append_once(unit.index)


def has_opened(keys: JobStore, index: int) -> bool:
    """Return whether a rank of the unit has opened its session."""
    return keys.has([f"{_OPENED}/of/{index}"])


def is_accompanied(keys: JobStore) -> bool:
    """Return whether at least two ranks of a unit have opened their sessions."""
    return SharedList(keys, _OPENED).count() > 1


def least_wait(within: float, unit: Unit) -> float:
    """Return how long to wait at least for ranks that have not opened a session, at most `within`, in seconds."""
    return min(within, interval(APART, unit.size))


class Presence:
    """The ranks that have arrived, as far as this rank has read their entries."""

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        # Published indices in the job, by index in the unit; they may differ from those that the unit assumes.
        self.global_ranks: dict[int, int] = {unit.index: unit.global_rank}
        self.nodes: dict[int, int] = {}  # published node ranks, by index in the unit; -1 if unknown
        self.departures: Departures = Departures(unit, keys)
        self._unit = unit
        self._keys = keys
        self._arrived: set[int] = set()  # indices of all arrivals read so far
        self._arrivals = SharedList(keys, "here")
        self._opened = SharedList(keys, _OPENED)
        self.began: float = time.monotonic()  # to wait for others

    def arrive(self) -> bool:
        """Publish that this rank has arrived; return whether it is the last one."""
        publish_opened(self._keys, self._unit)
        return self._arrivals.append_one_of(self.own_arrival(), self._unit.size)

    def own_arrival(self) -> Arrival:
        """Return this rank's entry."""
        node = self._keys.topology.node_rank
        return Arrival(self._unit.index, self._unit.global_rank, -1 if node is None else node)

    def learn(self, arrival: Arrival) -> int:
        """Store the entry of a rank, and return its index in the unit."""
        self.global_ranks[arrival.member], self.nodes[arrival.member] = arrival.global_rank, arrival.node
        return arrival.member

    def arrived(self) -> set[int]:
        """Return the ranks that have arrived. Reads new entries."""
        self._arrived.update(self.learn(Arrival(*arrival)) for arrival in self._arrivals.read_new())
        return self._arrived

    def have_all_arrived(self) -> bool:
        """Return whether all ranks of the unit have arrived."""
        return len(self.arrived()) == self._unit.size

    def present(self) -> set[int]:
        """Return the ranks that have arrived and are not gone."""
        arrived = self.arrived()
        return arrived - self.gone(arrived)

    def counts(self) -> tuple[int, int]:
        """Return how many ranks have opened a session, and how often ranks have arrived."""
        return self._opened.count(), self._arrivals.count()

    def gone(self, ranks: Iterable[int]) -> set[int]:
        """Return which of some ranks have published their departure. Reads new records."""
        return self.departures.among(ranks)

    def opened(self) -> set[int]:
        """Return the ranks that have opened a session. Reads new entries."""
        self._opened.read_new()
        return set(self._opened.values)

    def absent(self, generation: Generation) -> set[int]:
        """Return the ranks that have opened a session and should take part, but do not, and have not finished."""
        unfinished = {index for index, departure in self.departures.known.items() if departure.how != "finished"}
        return {*generation.lost, *unfinished} - self.departures.left - set(generation.members)

    @property
    def waited(self) -> float:
        """Seconds since this rank has begun to wait for other ranks."""
        return time.monotonic() - self.began

    def why_absent(self, index: int, generation: Generation) -> str:
        """Return why a rank is missing from this rank's first generation."""
        departure = self.departures.known.get(index)
        if departure is not None:
            how = "failed" if departure.how == "failed" else "ended its session"
            return f"{how} before the first exchange with rank {self._unit.global_rank}"
        if generation.number:
            return "took no part"
        return f"opened a session, but did not take part within {round(self.waited, 1):g} s"

    def global_rank(self, index: int) -> int:
        """Return the published index in the job of a rank of the unit; by default, `Unit.global_rank_of`."""
        departure = self.departures.known.get(index)
        if index in self.global_ranks or departure is None:
            return self.global_ranks.get(index, self._unit.global_rank_of(index))
        return departure.global_rank
