"""A list in the job's store to which all ranks append. Polling it for new values reads a single key."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from dist_wandb.store.job_store import JobStore
from dist_wandb.store.timed_caller import UnansweredError


class SharedList:
    """One rank's access to a shared list.

    To append a value, a rank increments the counter of the list, then sets the value at the new index. A rank that dies
    in between leaves an index without a value. A rank may append several values, for example if a session is opened
    again under the same name.
    """

    def __init__(self, keys: JobStore, name: str) -> None:
        self._keys = keys
        self._name = name
        self.values: list[Any] = []  # those that this rank has read
        self._known = 0  # number of indices that were read, or are in `_unread`
        self._unread: list[int] = []
        self._lock = threading.Lock()  # an abandoned call may overlap with the next one

    def append(self, value: Any) -> int:
        """Append a value; return its index, starting at 1."""
        self._keys.record_key(f"{self._name}/count")
        index = self._keys.count(f"{self._name}/count")
        self._keys.publish(f"{self._name}/{index}", value)
        return index

    def append_one_of(self, value: Any, number: int) -> bool:
        """Append a value, as `number` ranks do once each; return whether the list is complete, as exactly one finds."""
        self.append(value)
        # A second counter, because the rank with the last index may set its value before another rank does.
        self._keys.record_key(f"{self._name}/there")
        return self._keys.count(f"{self._name}/there") >= number

    def append_once(self, value: str | int) -> None:
        """Append a value unless the list has it, so that `count` is the number of distinct values."""
        self._keys.record_key(f"{self._name}/of/{value}")
        if self._keys.count(f"{self._name}/of/{value}") == 1:
            self.append(value)

    def count(self) -> int:
        """Return the number of values, including those that are about to be set."""
        return int(self._keys.try_get(f"{self._name}/count") or 0)

    def read_new(self) -> list[Any]:
        """Read and return the new values, in order."""
        return self._read(self.count())

    def read_new_soon(self) -> list[Any]:
        """Read and return the new values, in order; none if the store does not answer soon."""
        with suppress(UnansweredError):
            return self._read(int(self._keys.try_get_soon(f"{self._name}/count") or 0), soon=True)
        return []

    def _read(self, count: int, *, soon: bool = False) -> list[Any]:
        with self._lock:
            self._unread += range(self._known + 1, count + 1)
            self._known = max(self._known, count)
            keys = [f"{self._name}/{index}" for index in self._unread]
        if not keys:
            return []
        found = self._keys.get_present(keys, soon=soon)
        with self._lock:
            new = {index: found[f"{self._name}/{index}"] for index in self._unread if f"{self._name}/{index}" in found}
            self._unread = [index for index in self._unread if index not in new]
            self.values += new.values()
        return list(new.values())
