"""Merge metrics as the exchange of the ranks does, step by step in one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.attachments import Attachments
from dist_wandb.exchange.attachments.metrics import FusedMetrics
from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.transport import Group
from dist_wandb.payloads.framing import Bytes
from dist_wandb.payloads.metrics import Snapshot, take_snapshot


class _WaitingError(Exception):
    """The other members have not called yet."""


def _key(name: str) -> Key:
    return Key(name, 0, 0)


class Replayed(Group):
    """A process group that calls each member again for every collective, with the results of earlier collectives.

    Besides its own data, a member collects what was `sent`; `None`: more bytes than are accepted were announced.
    """

    def __init__(self, size: int, sent: Sequence[bytes] | None = ()) -> None:
        self.collectives: list[str] = []
        self._size = size
        self._sent = sent
        self._received: list[list[Any]] = []
        self._turn = 0

    def exchange(self, key: Key, members: Sequence[FusedMetrics], completing: Sequence[FusedMetrics]) -> None:
        """Exchange the states of a cell; only some members get the result."""
        waiting = [one for one in members if self._waits(one, key)]
        while waiting:
            waiting = [one for one in waiting if one in completing and self._waits(one, key)]

    def _waits(self, member: FusedMetrics, key: Key) -> bool:
        self._turn = 0
        try:
            member.exchange([key], self)
        except _WaitingError:
            return True
        return False

    def reduce_in_place(self, numbers: np.ndarray, summed: int) -> None:
        """See `Group.reduce_in_place`."""
        if not numbers.size:
            return
        received = np.stack(self._contribute("reduce", numbers.copy()))
        numbers[:summed], numbers[summed:] = received[:, :summed].sum(0), received[:, summed:].max(0)

    def collect(self, *data: Bytes) -> list[bytes]:
        """See `Group.collect`; all members get the data."""
        if self._sent is None:
            raise ConfigurationError("Member 1 of the group announced 9 bytes")
        return [*self._contribute("collect", b"".join(data)), *self._sent]

    def _contribute(self, kind: str, given: Any) -> list[Any]:
        turn, self._turn = self._turn, self._turn + 1
        if turn == len(self._received):
            self._received.append([])
            self.collectives.append(kind)
        assert self.collectives[turn] == kind
        if len(self._received[turn]) < self._size:
            self._received[turn].append(given)
            raise _WaitingError
        return self._received[turn]


class Ranks:
    """The metrics of several ranks, of which the first one computes."""

    def __init__(self, size: int) -> None:
        self.collectives: list[str] = []  # of the last exchange
        self._ranks: list[Any] = [FusedMetrics(Attachments(rank, Counter()), merges=rank == 0) for rank in range(size)]

    def log(self, metrics: Sequence[Any]) -> dict[str, Any]:
        """Merge one metric of each rank. Return the values that are written, by suffixes of names."""
        return self.bring_together([take_snapshot(metric) for metric in metrics])

    def bring_together(self, snapshots: Sequence[Snapshot]) -> dict[str, Any]:
        """Merge snapshots as `log` does."""
        for one, snapshot in zip(self._ranks, snapshots, strict=True):
            key = _key(one.series("", snapshot))
            one.keep(key, snapshot)
        group = Replayed(len(self._ranks))
        group.exchange(key, self._ranks, self._ranks)
        self.collectives = group.collectives
        values: dict[str, Any] = self._ranks[0].values.pop(key, ({}, 0))[0]
        return values
