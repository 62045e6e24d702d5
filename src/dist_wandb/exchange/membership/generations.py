"""Generations of members and their checkpoints, and their form in the job's store."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dist_wandb.store.job_store import JobStore
from dist_wandb.store.shared_list import SharedList
from dist_wandb.topology.ranges import blocks_of, numbers_in, spans_of, values_in


class CheckpointSummary(NamedTuple):
    """A summary of a member's checkpoint."""

    member: int  # its index in the unit
    round: int  # number of the last round that it took part in


class Departure(NamedTuple):
    """How a rank has left."""

    how: str  # `"finished"`, `"undelivered"` or `"failed"`
    global_rank: int


class Result(NamedTuple):
    """What a round has shown to all members."""

    offers: Mapping[bytes, frozenset[int]]  # what they have offered, each with the members that did
    sums: Sequence[float]  # the reduced lists
    maxima: Sequence[float]


@dataclass(frozen=True)
class Checkpoint:
    """The state of a member at the end of a generation: the last round that it took part in, with its result."""

    round: int  # number of that round
    result: Result | None  # of that round; `None` before the first one

    def as_json(self) -> dict[str, Any]:
        """Return a JSON value that preserves all bits of the numbers."""
        if self.result is None:
            return {"round": self.round, "result": None}
        offers = [[offer.decode(), spans_of(members)] for offer, members in self.result.offers.items()]
        return {"round": self.round, "result": [offers, *map(_encoded, self.result[1:])]}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Checkpoint:
        """Decode a value of `as_json`."""
        if stored["result"] is None:
            return cls(stored["round"], None)
        offers, *lists = stored["result"]
        of_members = {offer.encode(): frozenset(numbers_in(spans)) for offer, spans in offers}
        return cls(stored["round"], Result(of_members, *map(_decoded, lists)))


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
    gone: Mapping[int, Departure] = field(default_factory=dict)  # published departures, by index of the rank
    nodes: tuple[int, ...] = ()  # the node rank of each member; -1 if unknown

    def follows(self, other: Generation | None) -> bool:
        """Return whether this generation immediately follows another one."""
        return other is not None and other.number == self.number - 1

    def on_nodes(self, nodes: Mapping[int, int]) -> Generation:
        """Return a copy with the known nodes of its members."""
        return replace(self, nodes=tuple(nodes.get(member, -1) for member in self.members))

    def node_of(self) -> dict[int, int]:
        """Return the node rank of each member."""
        return dict(zip(self.members, self.nodes, strict=False))

    def as_list(self) -> list[Any]:
        """Return a JSON value of all fields except `number`."""
        members, joined, lost = (spans_of(ranks) for ranks in (self.members, self.joined, self.lost))
        return [members, joined, self.last_round, self.source, lost, _packed(self.gone), blocks_of(self.nodes)]

    @classmethod
    def from_list(cls, number: int, stored: Sequence[Any]) -> Generation:
        """Decode a value of `as_list`."""
        members, joined, last_round, source, lost, gone, nodes = stored
        members, joined, lost = (tuple(numbers_in(ranges)) for ranges in (members, joined, lost))
        return cls(number, members, joined, last_round, source, lost, _unpacked(gone), tuple(values_in(nodes)))


class GenerationStore:
    """One rank's access to the generations of a unit in the job's store."""

    def __init__(self, keys: JobStore, index: int) -> None:
        self._keys = keys
        self._index = index

    def summaries(self, generation: Generation) -> SharedList:
        """Return the list of `CheckpointSummary`s that the remaining members publish when a generation breaks."""
        return SharedList(self._keys, f"summaries/{generation.number}")

    def join_requests(self, generation: Generation) -> SharedList:
        """Return the list of ranks that request to join the next generation: each a `presence.Arrival`."""
        return SharedList(self._keys, f"join/{generation.number}")

    def is_elected(self, number: int, term: int) -> bool:
        """Return whether this rank is elected to claim a generation in this term; each term elects another one."""
        return bool(self._keys.claim(f"elected/{number}/{term}", self._index) == self._index)

    def get(self, number: int) -> Generation | None:
        """Return a generation, or `None` if it was not claimed yet."""
        stored = self._keys.try_get(f"generation/{number}")
        return None if stored is None else Generation.from_list(number, stored)

    def following(self, generation: Generation) -> Generation | None:
        """Return the next generation, or `None` if it was not claimed yet."""
        return self.get(generation.number + 1)

    def latest(self, generation: Generation) -> Generation:
        """Return the newest generation, which may be `generation` itself."""
        while (following := self.following(generation)) is not None:
            generation = following
        return generation

    def claim(self, generation: Generation) -> Generation:
        """Claim a generation; return the first claim of all ranks, which is the valid one."""
        stored = self._keys.claim(f"generation/{generation.number}", generation.as_list())
        return Generation.from_list(generation.number, stored)

    def mark_broken(self, generation: Generation) -> None:
        """Publish that a generation is over."""
        self._keys.publish(f"broken/{generation.number}", self._index)

    def is_broken(self, generation: Generation) -> bool:
        """Return whether any member has marked a generation as broken."""
        return self._keys.try_get_soon(f"broken/{generation.number}") is not None

    def publish_checkpoint(self, generation: Generation, checkpoint: Checkpoint) -> None:
        """Publish this rank's checkpoint at the end of a generation."""
        self._keys.publish(f"checkpoint/{generation.number}/{self._index}", checkpoint.as_json())

    def checkpoint_before(self, generation: Generation) -> Checkpoint | None:
        """Return the checkpoint of the last round before a generation; `None` for the first generation."""
        if generation.source is None:
            return None
        key = f"checkpoint/{generation.number - 1}/{generation.source}"
        return Checkpoint.from_json(self._keys.wait_get(key, "the unit"))

    def publish_state(self, generation: Generation, state: dict[str, Any]) -> None:
        """Publish the members' common state at the end of a generation, for ranks that join the next one."""
        self._keys.publish(f"state/{generation.number + 1}", state)

    def state(self, generation: Generation) -> dict[str, Any]:
        """Return the members' common state at the beginning of a generation that ranks have joined."""
        state: dict[str, Any] = self._keys.wait_get(f"state/{generation.number}", "the unit")
        return state


def _packed(gone: Mapping[int, Departure]) -> list[Any]:
    """Group ranks that have left in the same way, with the same distance between their indices in job and unit."""
    alike: dict[tuple[str, int], list[int]] = {}
    for index, departure in gone.items():
        alike.setdefault((departure.how, departure.global_rank - index), []).append(index)
    return [[how, shift, spans_of(indices)] for (how, shift), indices in alike.items()]


def _unpacked(stored: Sequence[Any]) -> dict[int, Departure]:
    return {index: Departure(how, index + shift) for how, shift, ranges in stored for index in numbers_in(ranges)}


def _encoded(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode("ascii")


def _decoded(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 8}d", data))
