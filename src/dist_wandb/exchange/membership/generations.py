"""Generations of members and their checkpoints, as they stand in the job's store."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dist_wandb.store.job_store import JobStore


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
    """

    number: int
    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    last_round: int = 0
    source: int | None = None

    def follows(self, other: Generation | None) -> bool:
        """Whether it is the next one after another."""
        return other is not None and other.number == self.number - 1

    def as_list(self) -> list[Any]:
        """As JSON can hold it, but for its number."""
        return [self.members, self.joined, self.last_round, self.source]

    @classmethod
    def from_list(cls, number: int, stored: Sequence[Any]) -> Generation:
        """The inverse of `as_list`."""
        members, joined, last_round, source = stored
        return cls(number, tuple(members), tuple(joined), last_round, source)


class GenerationStore:
    """Generations in the job's store, as one rank reads and writes them.

    Args:
        keys: Keys of the unit in the job's store.
        index: Index of this rank in the unit.
    """

    def __init__(self, keys: JobStore, index: int) -> None:
        self._keys = keys
        self._index = index

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

    def checkpoint_of(self, generation: Generation, member: int) -> Checkpoint | None:
        """What a member knew at the end of a generation, if it has said so."""
        stored = self._keys.try_get(f"checkpoint/{generation.number}/{member}")
        return None if stored is None else Checkpoint.from_json(stored)

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


def _encoded(numbers: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}d", *numbers)).decode("ascii")


def _decoded(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 8}d", data))
