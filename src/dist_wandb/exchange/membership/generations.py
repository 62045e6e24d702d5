"""What the ranks of a unit publish in the job's store: arrivals, departures, generations of members, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dist_wandb.job.job_store import JobStore, SharedList
from dist_wandb.job.ranges import blocks_of, numbers_in, spans_of, values_in
from dist_wandb.job.timed_caller import Interval, interval
from dist_wandb.settings.plan import Unit

APART = 2.0  # seconds that a rank waits at least for others: the ranks of a job do not start at the same time
_POLL_INTERVAL = 0.5  # seconds between two polls in `Presence.is_gone`
_OPENED = "opened"  # list of the ranks that have opened a session
_LEFT, _ENDED = "gone", "ended"  # list of the ranks that have left the exchange; how many have ended their runs since
_BEFORE = "before"  # those that had the session which this one continues


class Arrival(NamedTuple):
    """Where a rank is: the entry that it publishes when it arrives, requests to join, or leaves."""

    member: int  # its index in the unit
    global_rank: int  # it may differ from the one that the unit assumes
    node: int  # its node rank; -1 if unknown


@dataclass(frozen=True)
class Checkpoint:
    """The last round that a member took part in, with what it has shown to all members."""

    round: int  # its number; 0 before the first one
    offers: Mapping[bytes, frozenset[int]] = field(default_factory=dict)  # each with its members; empty if not known
    sums: Sequence[float] = ()  # the reduced lists
    maxima: Sequence[float] = ()

    def as_json(self) -> list[Any]:
        """Return a JSON value; JSON's numbers are exact."""
        offers = [[offer.decode(), spans_of(members)] for offer, members in self.offers.items()]
        return [self.round, offers, self.sums, self.maxima]

    @classmethod
    def from_json(cls, stored: list[Any]) -> Checkpoint:
        number, offers, sums, maxima = stored
        of_members = {offer.encode(): frozenset(numbers_in(spans)) for offer, spans in offers}
        return cls(number, of_members, sums, maxima)


@dataclass(frozen=True)
class Generation:
    """A period in which the same ranks take part in all rounds."""

    number: int  # counted from 0
    members: tuple[int, ...]  # their indices in the unit
    # members that were not in the previous generation, and take over the state of the others
    joined: tuple[int, ...] = ()
    last_round: int = 0  # number of the last round before this generation
    # member of the previous generation that has the result of that round, and the names known after it; if there are no
    # members, the primary of the session in which the ranks continue
    source: int | None = None
    lost: tuple[int, ...] = ()  # former members that have gone without publishing their departure
    gone: Mapping[int, str] = field(default_factory=dict)  # as in `Presence`
    places: Mapping[int, Arrival] = field(default_factory=dict)  # of all ranks that have arrived so far, by index

    @property
    def nodes(self) -> list[int]:
        """The node rank of each member; -1 if unknown."""
        return [self.places[member].node if member in self.places else -1 for member in self.members]

    def follows(self, other: Generation | None) -> bool:
        return other is not None and other.number == self.number - 1

    def as_list(self) -> list[Any]:
        members, joined, lost = (spans_of(ranks) for ranks in (self.members, self.joined, self.lost))
        ways = sorted({*self.gone.values()})
        gone = {how: spans_of(index for index, one in self.gone.items() if one == how) for how in ways}
        places = [*map(blocks_of, zip(*sorted(self.places.values()), strict=True))]
        return [members, joined, self.last_round, self.source, lost, gone, places]

    @classmethod
    def from_list(cls, number: int, stored: Sequence[Any]) -> Generation:
        members, joined, last_round, source, lost, gone, places = stored
        members, joined, lost = (tuple(numbers_in(ranges)) for ranges in (members, joined, lost))
        departures = {index: how for how, ranges in gone.items() for index in numbers_in(ranges)}
        arrivals = map(Arrival, *map(values_in, places)) if places else ()
        return cls(number, members, joined, last_round, source, lost, departures, {one.member: one for one in arrivals})


class GenerationStore:
    """One rank's access to the generations of a unit in the job's store."""

    def __init__(self, keys: JobStore, index: int) -> None:
        self._keys = keys
        self._index = index

    def summaries(self, generation: Generation) -> SharedList:
        """Return the list in which members publish, when a generation breaks, their index and their last round."""
        return SharedList(self._keys, f"summaries/{generation.number}")

    def join_requests(self, generation: Generation) -> SharedList:
        """Return the list of ranks that request to join the next generation: each an `Arrival`."""
        return SharedList(self._keys, f"join/{generation.number}")

    def is_elected(self, number: int, term: int) -> bool:
        """Return whether this rank is elected to claim a generation in this term; each term elects another one."""
        return bool(self._keys.claim(f"elected/{number}/{term}", self._index) == self._index)

    def get(self, number: int) -> Generation | None:
        stored = self._keys.try_get(f"generation/{number}")
        return None if stored is None else Generation.from_list(number, stored)

    def following(self, generation: Generation) -> Generation | None:
        return self.get(generation.number + 1)

    def latest(self, generation: Generation) -> Generation:
        while (following := self.following(generation)) is not None:
            generation = following
        return generation

    def claim(self, generation: Generation) -> Generation:
        """Claim a generation; return the first claim of all ranks, which is the valid one."""
        stored = self._keys.claim(f"generation/{generation.number}", generation.as_list())
        return Generation.from_list(generation.number, stored)

    def mark_broken(self, generation: Generation) -> None:
        self._keys.publish(f"broken/{generation.number}", self._index)

    def is_broken(self, generation: Generation) -> bool:
        return self._keys.try_get(f"broken/{generation.number}", soon=True) is not None

    def publish_checkpoint(self, generation: Generation, checkpoint: Checkpoint) -> None:
        self._keys.publish(f"checkpoint/{generation.number}/{self._index}", checkpoint.as_json())

    def checkpoint_before(self, generation: Generation) -> Checkpoint:
        """Return the checkpoint of the last round before a generation, which is not the first one."""
        key = f"checkpoint/{generation.number - 1}/{generation.source}"
        return Checkpoint.from_json(self._keys.wait_get(key, "the unit"))

    def publish_state(self, generation: Generation, state: dict[str, Any]) -> None:
        self._keys.publish(f"state/{generation.number + 1}", state)

    def state(self, generation: Generation) -> dict[str, Any]:
        state: dict[str, Any] = self._keys.wait_get(f"state/{generation.number}", "the unit")
        return state


def keys_of(unit: Unit) -> str:
    return f"unit/{unit.name}"


def publish_opened(keys: JobStore, unit: Unit) -> None:
    SharedList(keys, _OPENED).append_once(unit.index)


def has_opened(keys: JobStore, index: int) -> bool:
    return keys.has([f"{_OPENED}/of/{index}"])


def number_opened(keys: JobStore) -> int:
    return SharedList(keys, _OPENED).count()


def publish_ended(keys: JobStore) -> None:
    keys.count(_ENDED)


def number_ending(keys: JobStore) -> int:
    """Return how many ranks have left the exchange, but not ended their runs, for which W&B may still upload."""
    return SharedList(keys, _LEFT).count() - int(keys.try_get(_ENDED) or 0)


def least_wait(within: float, unit: Unit) -> float:
    """Return how long to wait at least for ranks that have not opened a session, at most `within`, in seconds."""
    return min(within, interval(APART, unit.size))


class Presence:
    """The ranks that have arrived, and those that have left, as far as this rank has read their entries."""

    def __init__(self, unit: Unit, keys: JobStore) -> None:
        node = keys.topology.node_rank
        self.own: Arrival = Arrival(unit.index, unit.global_rank, -1 if node is None else node)
        self.places: dict[int, Arrival] = {unit.index: self.own}  # of the ranks known so far, by index in the unit
        # How ranks have left, by index: `"finished"`, after they had delivered everything; `"undelivered"`, before
        # that; or `"failed"`.
        self.gone: dict[int, str] = {}
        self.last_rounds: dict[int, dict[int, int]] = {}  # of ranks that are gone, by number of their last generation
        self._unit = unit
        self._keys = keys
        self._arrived: set[int] = set()  # indices of all arrivals read so far
        self._arrivals = SharedList(keys, "here")
        self._opened = SharedList(keys, _OPENED)
        self._departures = SharedList(keys, _LEFT)
        self._next_poll = Interval(_POLL_INTERVAL, unit.size)
        self.began: float = time.monotonic()  # to wait for others
        self.stand_in: int | None = None  # index of the rank that writes if the store is gone; `None` if not known

    def arrive(self) -> bool:
        """Publish that this rank has arrived; return whether it is the last one."""
        publish_opened(self._keys, self._unit)
        return self._arrivals.append_one_of(self.own, self._unit.size)

    def learn(self, entry: Sequence[int]) -> int:
        """Note the place of a rank, as it was read from a list; return its index."""
        arrival = Arrival(*entry)
        self.places[arrival.member] = arrival
        return arrival.member

    def arrived(self) -> set[int]:
        """Return the ranks that have arrived. Reads new entries."""
        self._arrived.update(map(self.learn, self._arrivals.read_new()))
        return self._arrived

    def present(self) -> set[int]:
        arrived = self.arrived()
        return arrived - self.gone_among(arrived)

    def counts(self) -> tuple[int, int]:
        return self._opened.count(), self._arrivals.count()

    def opened(self) -> set[int]:
        """Return the ranks that have opened a session. Reads new entries."""
        self._opened.read_new()
        return set(self._opened.values)

    def has_primary(self) -> bool:
        return has_opened(self._keys, 0)

    def publish_before(self, former: Presence) -> None:
        """Publish the ranks that have the session which this one continues: those that do not come are missing."""
        if not self._keys.has([_BEFORE]):
            there = former.opened() | former.before()
            left = former.gone_among(there)
            self._keys.claim(_BEFORE, [former._unit.ranks[index] for index in there - left])

    def before(self) -> set[int]:
        return {self._unit.ranks.index(rank) for rank in self._keys.try_get(_BEFORE) or ()}

    def choose_stand_in(self) -> None:
        """Agree on the rank that writes if the store is gone: the first to find, after `least_wait`, no rank 0 here."""
        if self.stand_in is None:
            self.stand_in = 0 if self.has_primary() else int(self._keys.claim("stand-in", self._unit.index))

    def absent(self, generation: Generation) -> set[int]:
        """Return the ranks that have opened a session and should take part, but do not, and have not finished."""
        return {*generation.lost, *self.gone} - self.ended("finished") - {*generation.members}

    @property
    def waited(self) -> float:
        """Seconds since this rank has begun to wait for other ranks."""
        return time.monotonic() - self.began

    def global_rank(self, index: int) -> int:
        """Return the published index in the job of a rank of the unit; by default, `Unit.global_rank_of`."""
        return self.places[index].global_rank if index in self.places else self._unit.global_rank_of(index)

    # Departures

    def ended(self, *how: str) -> set[int]:
        """Return the ranks that have left in one of these ways, as in `gone`."""
        return {index for index, one in self.gone.items() if one in how}

    def leave(self, how: str, number: int | None, last_round: int) -> None:
        """Publish that this rank is gone; `number` is that of its generation, if it was in one."""
        self._departures.append([self.own, how, number, last_round])

    def gone_among(self, ranks: Iterable[int]) -> set[int]:
        """Return which of some ranks have published their departure. Reads new records."""
        for place, how, number, last_round in self._departures.read_new():
            member = self.learn(place)
            self.gone[member] = how
            if number is not None:
                self.last_rounds.setdefault(number, {})[member] = last_round
        return self.gone.keys() & set(ranks)

    def are_gone(self, ranks: Collection[int]) -> bool:
        return self._departures.count() >= len(ranks) and self.gone_among(ranks) == set(ranks)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank has published its departure. Polls the store at intervals only."""
        if self._next_poll.is_over(time.monotonic()):
            self.gone_among([rank])
        return rank in self.gone
