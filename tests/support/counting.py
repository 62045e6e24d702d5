"""Counts calls of the job's store: operations, keys and bytes, by rank and by family of keys.

Ranks are threads. The store and the groups are in memory.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_wandb.exchange.transport import BrokenError, gloo, members_of

_kept: list[dist.Store] = []  # C++ keeps the store alive, but not its Python attributes
_SLICE = 0.1  # seconds between two checks whether to stop waiting


class Counts:
    """The calls of each rank. `operations` and `bytes` are by rank, `keys` by rank and family."""

    def __init__(self) -> None:
        self.operations: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self.keys: Counter[tuple[int, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, rank: int, keys: Sequence[str], size: int = 0) -> None:
        with self._lock:
            self.operations[rank] += 1
            self.bytes[rank] += size + sum(map(len, keys))
            for key in keys:
                self.keys[rank, family_of(key)] += 1

    def of(self, rank: int) -> int:
        """Return how many keys a rank has read or written."""
        return sum(number for (of, _), number in self.keys.items() if of == rank)

    def per_rank(self, size: int) -> float:
        """Return how many keys each of a number of ranks has read or written, on average."""
        return sum(self.keys.values()) / size

    def by_family(self) -> Counter[str]:
        families: Counter[str] = Counter()
        for (_, family), number in self.keys.items():
            families[family] += number
        return families


def family_of(key: str) -> str:
    """Return the family of a key: the key without session, rank and generation."""
    return re.sub(r"\d+", "#", key.removeprefix("test/1/").removeprefix("test/"))


class CountedStore(dist.Store):
    """One rank's access to a store in this process, which counts its calls; `before` may wait, or raise an error."""

    def __init__(
        self, store: dist.Store, rank: int, counts: Counts, before: Callable[[str, Any], None] = lambda *_: None
    ) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._counts = counts
        self._before = before
        _kept.append(self)

    def set(self, key: str, value: Any) -> None:
        self._before(key, value)
        self._counts.add(self._rank, [key], len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._before(key, None)
        value = self._store.get(key)
        self._counts.add(self._rank, [key], len(value))
        return value

    def add(self, key: str, amount: int) -> int:
        self._before(key, amount)
        self._counts.add(self._rank, [key], 8)
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._before(key, None if desired == expected else desired)
        value = self._store.compare_set(key, expected, desired)
        self._counts.add(self._rank, [key], len(value) + len(expected) + len(desired))
        return value

    def check(self, keys: list[str]) -> bool:
        self._before(keys[0], None)
        self._counts.add(self._rank, keys)
        return self._store.check(keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._before(keys[0], None)
        values = self._store.multi_get(keys)
        self._counts.add(self._rank, keys, sum(map(len, values)))
        return values

    def delete_key(self, key: str) -> bool:
        self._before(key, None)
        self._counts.add(self._rank, [key])
        return self._store.delete_key(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def clone(self) -> dist.Store:
        return self

    deleteKey, compareSet, multiGet = delete_key, compare_set, multi_get  # noqa: N815  # names that torch may call


class Outage:
    """The outage of a store in this process: between `begin` and `end`, no call of a rank is answered."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._counts = Counts()
        self._is_here = threading.Event()
        self.begin, self.end = self._is_here.set, self._is_here.clear

    def store_of(self, rank: int) -> CountedStore:
        return CountedStore(self._store, rank, self._counts, self._refuse)

    def _refuse(self, _key: str, _value: Any) -> None:
        if self._is_here.is_set():
            raise RuntimeError("the store is gone")


class _Room:
    """The shared state of the members of a group in memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.given: dict[int, dict[int, Any]] = {}
        self.made: dict[int, Any] = {}
        self.is_broken = False


class MemoryGroup:
    """A `GlooGroup` whose members are threads of this process."""

    _rooms: dict[str, _Room] = {}  # noqa: RUF012  # of all groups
    _lock = threading.Lock()

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: float,
        is_over: Callable[[], bool],
        *_: Any,
    ) -> None:
        name = str(uuid.uuid4())
        name = store.compare_set("0/room", "", name).decode()
        with self._lock:
            self._room = self._rooms.setdefault(name, _Room(size))
        self.rank, self.size, self._timeout, self._is_over = rank, size, timeout, is_over
        self._numbers = itertools.count()
        self._together(None, lambda _: None)

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        def make(given: list[Any]) -> tuple[list[float], list[float]]:
            firsts = [sum(numbers) for numbers in zip(*(first for first, _ in given), strict=True)]
            return firsts, [max(numbers) for numbers in zip(*(second for _, second in given), strict=True)]

        summed, largest = self._together((list(sums), list(maxima)), make)
        return list(summed), list(largest)

    def reduce_tensors(self, sums: torch.Tensor, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        summed, largest = self.reduce(sums.tolist(), maxima.tolist())
        return sums.copy_(torch.tensor(summed)), maxima.copy_(torch.tensor(largest))

    def tally(self, data: bytes) -> dict[bytes, frozenset[int]]:
        return members_of(self._together(data, list))

    def collect(self, *data: bytes, **_: Any) -> list[bytes]:
        gathered = self._together(b"".join(data), list)
        return [] if self.rank else list(gathered)

    def send_to_first(self, own: torch.Tensor, received: list[torch.Tensor], _deadline: float) -> None:
        given = self._together(own.clone(), list)
        for row, numbers in zip(received, given, strict=False):
            row.copy_(numbers)

    def receive_from_first(self, numbers: torch.Tensor, _deadline: float) -> None:
        numbers.copy_(self._together(numbers.clone(), lambda given: given[0]))

    def close(self) -> None:
        with self._room.changed:
            self._room.is_broken = True
            self._room.changed.notify_all()

    def _together(self, own: Any, make: Callable[[list[Any]], Any]) -> Any:
        room, number, deadline = self._room, next(self._numbers), time.monotonic() + self._timeout
        with room.changed:
            given = room.given.setdefault(number, {})
            given[self.rank] = own
            if len(given) == self.size:
                room.made[number] = make([given[rank] for rank in range(self.size)])
                room.given.pop(number)
                room.made.pop(number - 2, None)
                room.changed.notify_all()
            while number not in room.made:
                if room.is_broken or self._is_over() or time.monotonic() > deadline:
                    raise BrokenError("a member is gone or too late, or waiting was stopped")
                room.changed.wait(_SLICE)
            return room.made[number]


@contextmanager
def groups_in_memory() -> Iterator[None]:
    """Let exchanges form groups in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo, "GlooGroup", MemoryGroup)
        yield
