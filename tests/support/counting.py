"""Counts calls of the job's store: operations, keys and bytes, by rank and by family of keys.

Ranks are threads, and the store is in memory; for jobs on a simulated clock see `simulation.Store`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

_kept: list[dist.Store] = []  # C++ keeps the store alive, but not its Python attributes


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
