"""Generations of members and their checkpoints, as they stand in the job's store."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dist_wandb.store.job_store import JobStore
from dist_wandb.store.shared_list import SharedList
from dist_wandb.topology.ranges import blocks_of, numbers_in, spans_of, values_in


class Word(NamedTuple):
    """What a member says of its checkpoint.

    Args:
        member: Its index in the unit.
        round: Number of the last round that it took part in.
        names: How many names it knows.
    """

    member: int
    round: int
    names: int


class Departure(NamedTuple):
    """How a rank has gone.

    Args:
        how: `"finished"`, `"undelivered"` or `"failed"`.
        global_rank: Its index in the job.
    """

    how: str
    global_rank: int


@dataclass(frozen=True)
class Checkpoint:
    """What a member knows when its generation breaks: the last round it took part in, with the result.

    Args:
        round: Number of that round.
        names: The names it knows, in their order.
        result: The reduced lists of that round; `None` before the first.
    """

    round: int
    names: list[str]
    result: tuple[Sequence[float], Sequence[float]] | None

    def as_json(self) -> dict[str, Any]:
        """As JSON can hold it, with all bits of the numbers."""
        result = None if self.result is None else [_encoded(numbers) for numbers in self.result]
        return {"round": self.round, "names": self.names, "result": result}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Checkpoint:
        """The inverse of `as_json`."""
        result = stored["result"]
        return cls(stored["round"], stored["names"], (_decoded(result[0]), _decoded(result[1])) if result else None)


@dataclass(frozen=True)
class Generation:
    """A time in which the same ranks go through rounds together.

    Args:
        number: 0, 1, 2, ...
        members: Indices in the unit of those that take part.
        joined: Those of them that were not in the generation before, and take over the state of the others.
        last_round: Number of the round before this generation.
        source: The member of the generation before that has the result of that round, and the names known after it.
        lost: Ranks that were members once, and are neither members nor gone with a word.
        gone: Ranks that have gone with a word, and how.
        nodes: For each member the rank of its node; -1 where it is not known.
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    last_round: int = 0
    source: int | None = None
    lost: tuple[int, ...] = ()
    gone: Mapping[int, Departure] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()

    def follows(self, other: Generation | None) -> bool:
        """Whether it is the next one after another."""
        return other is not None and other.number == self.number - 1

    def on_nodes(self, nodes: Mapping[int, int]) -> Generation:
        """The same with the nodes of its members, as far as they are known."""
        return replace(self, nodes=tuple(nodes.get(member, -1) for member in self.members))

    def node_of(self) -> dict[int, int]:
        """The rank of the node of each member."""
        return dict(zip(self.members, self.nodes, strict=False))

    def as_list(self) -> list[Any]:
        """As JSON can hold it, but for its number."""
        members, joined, lost = (spans_of(ranks) for ranks in (self.members, self.joined, self.lost))
        return [members, joined, self.last_round, self.source, lost, _packed(self.gone), blocks_of(self.nodes)]

    @classmethod
    def from_list(cls, number: int, stored: Sequence[Any]) -> Generation:
        """The inverse of `as_list`."""
        members, joined, last_round, source, lost, gone, nodes = stored
        members, joined, lost = (tuple(numbers_in(ranges)) for ranges in (members, joined, lost))
        return cls(number, members, joined, last_round, source, lost, _unpacked(gone), tuple(values_in(nodes)))


class GenerationStore:
    """Generations in the job's store, as one rank reads and writes them.

    Args:
        keys: Keys of the unit in the job's store.
        index: Index of this rank in the unit.
    """

    def __init__(self, keys: JobStore, index: int) -> None:
        self._keys = keys
        self._index = index

    def words(self, generation: Generation) -> SharedList:
        """What members that stay say of their checkpoints at the end of a generation: each a `Word`."""
        return SharedList(self._keys, f"words/{generation.number}")

    def wanting(self, generation: Generation) -> SharedList:
        """Which ranks outside of a generation want to join the next: see `Presence.own_arrival`."""
        return SharedList(self._keys, f"want/{generation.number}")

    def is_elected(self, number: int, term: int) -> bool:
        """Whether this rank is the one to claim a generation; asked anew for each term, should one elected be gone."""
        return bool(self._keys.claim(f"elected/{number}/{term}", self._index) == self._index)

    def get(self, number: int) -> Generation | None:
        """The generation of this number, if somebody has claimed it."""
        stored = self._keys.try_get(f"generation/{number}")
        return None if stored is None else Generation.from_list(number, stored)

    def following(self, generation: Generation) -> Generation | None:
        """The generation after this one, if somebody has claimed it."""
        return self.get(generation.number + 1)

    def latest(self, generation: Generation) -> Generation:
        """The newest generation after `generation`, or itself."""
        following = self.following(generation)
        return generation if following is None else self.latest(following)

    def claim(self, generation: Generation) -> Generation:
        """Begin a generation; what it is, as the first claim of all ranks counts."""
        stored = self._keys.claim(f"generation/{generation.number}", generation.as_list())
        return Generation.from_list(generation.number, stored)

    def mark_broken(self, generation: Generation) -> None:
        """Say that this generation is over."""
        self._keys.publish(f"broken/{generation.number}", self._index)

    def is_broken(self, generation: Generation) -> bool:
        """Whether some member found this generation broken."""
        return self._keys.try_get_soon(f"broken/{generation.number}") is not None

    def publish_checkpoint(self, generation: Generation, checkpoint: Checkpoint) -> None:
        """Say what this rank knows at the end of a generation."""
        self._keys.publish(f"checkpoint/{generation.number}/{self._index}", checkpoint.as_json())

    def checkpoint_before(self, generation: Generation) -> Checkpoint | None:
        """What was known of the last round before `generation`; `None` for the first."""
        if generation.source is None:
            return None
        key = f"checkpoint/{generation.number - 1}/{generation.source}"
        return Checkpoint.from_json(self._keys.wait_get(key, "the unit"))

    def publish_state(self, generation: Generation, state: dict[str, Any]) -> None:
        """Say what the members know together at the end of a generation, for those that join the next one."""
        self._keys.publish(f"state/{generation.number + 1}", state)

    def state(self, generation: Generation) -> dict[str, Any]:
        """What the members know together at the beginning of a generation that ranks joined."""
        state: dict[str, Any] = self._keys.wait_get(f"state/{generation.number}", "the unit")
        return state


def _packed(gone: Mapping[int, Departure]) -> list[Any]:
    """In short: ranks that have gone in one way, and whose index in the job is as far from that in the unit."""
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
