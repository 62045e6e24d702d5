"""Metrics of torchmetrics on their way through the rounds: which states belong together, and their fused exchange.

In the rounds a metric is a name without a number: they tell which ranks logged it, and when all of them have. Then its
states are exchanged once, together with those of all other metrics that are due.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dist_wandb.metrics import Layout, Packed, Snapshot, take_snapshot
from dist_wandb.rounds import Key, Rounds

if TYPE_CHECKING:
    from dist_wandb.gloo import Group

_log = logging.getLogger("dist_wandb")

_SEPARATOR = "\0"  # in no name that a user could see: what follows it is the layout of the states
_REMEMBERED = 8  # snapshots kept for ranks that come late, beyond those that wait
_LENGTH = 8  # bytes of a length


def is_metric_name(name: str) -> bool:
    """Whether a name of the rounds stands for a metric: it has the layout of its states, which is a list."""
    return f"{_SEPARATOR}[" in name


def shown(name: str) -> str:
    """A name of the rounds as the user knows it."""
    return name.partition(_SEPARATOR)[0]


def computed_alone(name: str, metric: Any) -> dict[str, Any]:
    """The values of a metric on this rank, by the names they have in the row; the metric is not changed."""
    snapshot = take_snapshot(metric)
    packed = snapshot.packed()
    values = snapshot.compute(packed.sums, packed.maxima, [packed.blob], 1)
    return {name + suffix: value for suffix, value in values.items()}


class FusedMetrics:
    """One rank's part in the exchange of metrics' states.

    Args:
        rank: This rank, for messages.
        computes: Whether this rank computes the merged values.
    """

    def __init__(self, rank: int, *, computes: bool) -> None:
        self._rank = rank
        self._computes = computes
        self._snapshots: OrderedDict[Key, Snapshot] = OrderedDict()
        self._newest: dict[str, Snapshot] = {}  # by name of the rounds: they know how to compute
        self._values: dict[Key, tuple[dict[str, Any], int]] = {}
        self._last: set[Key] = set()  # of the last exchange: one that broke on another rank is repeated
        self._before: set[Key] = set()  # of those before it, in which all ranks have succeeded
        self._warned: set[str] = set()

    def name_of(self, name: str, snapshot: Snapshot, known: Sequence[str]) -> str:
        """The name for the rounds: that of a layout which the ranks know already, if the states fit into it."""
        for other in known:
            if shown(other) == name and is_metric_name(other) and self._adopts(snapshot, other):
                return other
        if snapshot.fallback is not None:
            self._warn(name, f"{name!r} on rank {self._rank}: {snapshot.fallback}")
        return f"{name}{_SEPARATOR}{snapshot.signature}"

    def _adopts(self, snapshot: Snapshot, name: str) -> bool:
        try:
            return snapshot.adopt(name.partition(_SEPARATOR)[2])
        except Exception as error:  # noqa: BLE001  # whatever a metric raises must not end the exchange
            self._warn(f"adopt {name}", f"the states of {shown(name)!r} on rank {self._rank} cannot be sent: {error!r}")
            return False

    def keep(self, key: Key, snapshot: Snapshot) -> None:
        """Remember what this rank contributes to a cell."""
        self._snapshots[key] = self._newest[key.name] = snapshot

    def settle(self, rounds: Rounds) -> None:
        """After the ranks agreed on names: take over the layouts of others, where this rank's states fit into them."""
        for name in [name for name in rounds.pending_names() if is_metric_name(name)]:
            waiting = [key for key in self._snapshots if key.name == name]
            adopted = {self.name_of(shown(name), self._snapshots[key], rounds.names) for key in waiting}
            if len(adopted) == 1 and adopted != {name}:
                for old, new in rounds.rename(name, adopted.pop()):
                    self.keep(new, self._snapshots.pop(old))

    def exchange(self, keys: Sequence[Key], group: Group) -> None:
        """Bring together the states of the metrics of some cells: all ranks call it with the same cells.

        Raises:
            BrokenError: The exchange did not come about.
        """
        import torch

        layouts = [Layout.parse(key.name.partition(_SEPARATOR)[2]) for key in keys]
        packed = [self._packed(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        voices = [torch.tensor([float(key in self._snapshots)], dtype=torch.float64) for key in keys]
        sums = torch.cat([part for own, voice in zip(packed, voices, strict=True) for part in (voice, own.sums)])
        sums, maxima = group.reduce_tensors(sums, torch.cat([own.maxima for own in packed]))
        blobs = [[b""] for _ in keys]
        if any(layout.has_blob for layout in layouts):
            told = group.gather(b"".join(_framed(own.blob) for own in packed))
            blobs = [list(column) for column in zip(*(_unframed(data, len(keys)) for data in told), strict=True)]
        start = start_maxima = 0
        for key, layout, gathered in zip(keys, layouts, blobs, strict=True):
            spoke, numbers = int(sums[start]), sums[start + 1 : start + 1 + layout.sums]
            largest = maxima[start_maxima : start_maxima + layout.maxima]
            start, start_maxima = start + 1 + layout.sums, start_maxima + layout.maxima
            if self._computes:
                self._values[key] = self._computed(key, numbers, largest, gathered, spoke), spoke
        self._forget(keys)

    def take_values(self, key: Key) -> tuple[dict[str, Any], int]:
        """The merged values of a cell, by the names they have in the row, and how many ranks had a part in them."""
        return self._values.pop(key, ({}, 0))

    def _forget(self, keys: Sequence[Key]) -> None:
        """After an exchange: let go of the oldest snapshots that no rank can need, but for some that come late."""
        self._before |= (self._last - set(keys)) & self._snapshots.keys()
        self._last = set(keys)
        while len(self._snapshots) > _REMEMBERED and next(iter(self._snapshots)) in self._before:
            self._before.discard(self._snapshots.popitem(last=False)[0])

    def _packed(self, key: Key, layout: Layout) -> Packed:
        if key not in self._snapshots:
            return layout.neutral()
        try:
            packed = self._snapshots[key].packed()
        except Exception as error:  # noqa: BLE001  # whatever a metric raises must not end the exchange
            self._warn(
                f"pack {key.name}", f"{shown(key.name)!r} on rank {self._rank} has no part in its row: {error!r}"
            )
            del self._snapshots[key]
            return layout.neutral()
        if (packed.sums.numel(), packed.maxima.numel()) == (layout.sums, layout.maxima):
            return packed
        self._warn(f"layout {key.name}", f"the states of {shown(key.name)!r} on rank {self._rank} do not fit")
        del self._snapshots[key]  # gloo aborts the process where ranks reduce lists of different lengths
        return layout.neutral()

    def _computed(self, key: Key, sums: Any, maxima: Any, blobs: list[bytes], voices: int) -> dict[str, Any]:
        snapshot = self._snapshots.get(key) or self._newest.get(key.name)
        name = shown(key.name)
        if snapshot is None:
            message = (
                f"{name!r} was logged as a metric by other ranks, but never by rank {self._rank}, which computes it"
            )
            self._warn(name, f"{message}. It is not written. Log it on all ranks.")
            return {}
        try:
            values = snapshot.compute(sums, maxima, blobs, voices)
        except Exception as error:  # noqa: BLE001  # whatever a metric raises must not end the exchange
            self._warn(f"compute {name}", f"{name!r} could not be computed from the ranks' states: {error!r}")
            return {}
        return {name + suffix: value for suffix, value in values.items()}

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("dist_wandb: %s", message)


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH, "little") + data


def _unframed(data: bytes, number: int) -> list[bytes]:
    parts = []
    for _ in range(number):
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        parts.append(data[_LENGTH:end])
        data = data[end:]
    return parts
