"""A list in the job's store to which all ranks append: as long as nothing is new, whoever reads it asks for one key."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from dist_wandb.store.job_store import JobStore
from dist_wandb.store.timed_caller import UnansweredError


class SharedList:
    """A list of values, as one rank sees it.

    A rank first counts the list up, then sets the value of its place. Who dies between the two leaves a place without
    a value. A rank may append several times, such as a session that is opened again under the same name.

    Args:
        keys: Where its keys are.
        name: Of the list, equal on all ranks.

    Attributes:
        values: Those that this rank has read.
    """

    def __init__(self, keys: JobStore, name: str) -> None:
        self._keys = keys
        self._name = name
        self.values: list[Any] = []
        self._known = 0  # places that were looked at, or are in `_unread`
        self._unread: list[int] = []
        self._lock = threading.Lock()  # a call that was given up may go on beside the next one

    def append(self, value: Any) -> int:
        """Append a value; which place it has, from 1 on."""
        self._keys.record_key(f"{self._name}/count")
        place = self._keys.count(f"{self._name}/count")
        self._keys.publish(f"{self._name}/{place}", value)
        return place

    def append_one_of(self, value: Any, number: int) -> bool:
        """Append a value where a number of ranks append one each; whether all values are there with this one.

        The place does not show it: who has the last one may come to its value before another rank does. So ranks count
        again, with their values there. One rank alone finds the list complete, and has not to wait for anything.
        """
        self.append(value)
        self._keys.record_key(f"{self._name}/there")
        return self._keys.count(f"{self._name}/there") >= number

    def append_once(self, value: str | int) -> None:
        """Append a value that no other rank appends, unless it is there already: `count` is then how many differ."""
        self._keys.record_key(f"{self._name}/of/{value}")
        if self._keys.count(f"{self._name}/of/{value}") == 1:
            self.append(value)

    def count(self) -> int:
        """How many values there are, or will be in a moment."""
        return int(self._keys.try_get(f"{self._name}/count") or 0)

    def news(self) -> list[Any]:
        """The values that this rank has not read yet, in their order."""
        return self._read(self.count())

    def news_soon(self) -> list[Any]:
        """As `news`, but none if the store does not answer soon."""
        with suppress(UnansweredError):
            return self._read(int(self._keys.try_get_soon(f"{self._name}/count") or 0), soon=True)
        return []

    def _read(self, count: int, *, soon: bool = False) -> list[Any]:
        with self._lock:
            self._unread += range(self._known + 1, count + 1)
            self._known = max(self._known, count)
            asked = list(self._unread)
        if not asked:
            return []
        found = self._keys.get_present([f"{self._name}/{place}" for place in asked], soon=soon)
        with self._lock:
            new = {place: found[f"{self._name}/{place}"] for place in self._unread if f"{self._name}/{place}" in found}
            self._unread = [place for place in self._unread if place not in new]
            self.values += new.values()
        return list(new.values())
