"""Metrics of torchmetrics as contributions to an exchange between ranks: snapshot, pack, merge, compute.

On the training thread, `take_snapshot` copies the states of a metric and leaves the user's object unchanged. On another
thread, the snapshot becomes numbers to be summed over ranks, numbers whose maximum is taken, and bytes to be gathered.
The result is put into a private copy of the metric, which computes the same value as torchmetrics' own synchronisation.
This module does not communicate with other ranks, and nothing is pickled.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import weakref
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import as_tensor, event_after, has_passed, on_host, wait_for
from dist_wandb.payloads.framing import Bytes, decode, pieces_of
from dist_wandb.payloads.metric_merging import Layout, Node, Packed, Reduced, neutral, reduced_states, states_in_full
from dist_wandb.payloads.metric_states import (
    IN_MAXIMA,
    IN_SUMS,
    Shell,
    attributes_of,
    current,
    is_default,
    joined,
    kept,
    obstacle,
    separated,
    states_of,
    updates_of,
    walk,
)

_LEAST_SIZE = 8192  # bytes of a snapshot besides its states, mostly of its private copy of the metric
_OF_TENSOR = 1024  # bytes of a tensor besides its numbers


def is_metric(value: object) -> bool:
    """Return whether a value is torchmetrics' `Metric`, `MetricCollection` or `MetricTracker`. Does not import it."""
    if isinstance(value, (int, float, str)):
        return False
    module = sys.modules.get("torchmetrics")
    known = tuple(getattr(module, name, None) for name in ("Metric", "MetricCollection", "MetricTracker"))
    return None not in known and isinstance(value, known)  # type: ignore[arg-type]  # both are types here


class Found(NamedTuple):
    """A logged metric, or one of the metrics in a collection or a wrapper, at the time of logging."""

    node: Node  # with the states that it has, also without data, or if an earlier node has identical ones
    values: dict[str, Any]  # copies of the states, by name
    updates: int  # how often it was updated
    attributes: dict[str, Any]  # its other attributes


class Snapshot:
    """The states of a logged metric or collection at the time of logging. Made by `take_snapshot`.

    All methods must be called on one background thread.
    """

    def __init__(
        self,
        found: list[Found],
        shell: Shell,
        marks: list[Any],  # of each device, the event after the copies of the states; `None` if it has no events
        fallback: str | None,  # why the value cannot be merged exactly, as a sentence; `None` if it can
    ) -> None:
        self.fallback = fallback
        self.metric: str = type(shell.value).__name__  # that was logged
        self._found = found
        self._shell = shell
        self._marks: list[Any] | None = marks

    def is_ready(self) -> bool:
        return all(mark is None or has_passed(mark) for mark in self._marks or ())

    def has_arrived(self) -> bool:
        """Return whether the states are on the host: else they are copied behind what the device does meanwhile."""
        return not self._marks

    @property
    def size(self) -> int:
        """Approximate number of bytes that it needs on the host."""
        self.to_host()
        states = {id(member.values): member.values for member in self._found}
        return _LEAST_SIZE + sum(_size_of(value) for values in states.values() for value in values.values())

    def without_states(self) -> Snapshot:
        """Return a copy without data, which can compute from those of other ranks."""
        copied = copy.copy(self)
        copied._found = [member._replace(values={}) for member in self._found]  # noqa: SLF001  # of this class
        copied._marks, copied.held = None, [False] * len(self._found)  # noqa: SLF001
        return copied

    def to_host(self) -> None:
        """Copy the states to the CPU. Waits for their devices. Other methods call this first."""
        if self._marks is None:
            return
        for mark in filter(None, self._marks):
            wait_for(mark)
        copies: dict[int, dict[str, Any]] = {}
        for member in self._found:
            if id(member.values) not in copies:
                lists = {state.name for state in member.node.states if state.kind == "cat"}
                copies[id(member.values)] = {
                    name: _on_host(joined(value) if name in lists else value) for name, value in member.values.items()
                }
        self._found = [member._replace(values=copies[id(member.values)]) for member in self._found]
        self._marks = None

    @cached_property
    def held(self) -> list[bool]:
        """For each node, whether this rank has data: it was updated, or its states are not the defaults."""
        self.to_host()
        return [
            own.updates > 0 or not all(is_default(metric, state, own.values[state.name]) for state in own.node.states)
            for own, metric in zip(self._found, self._shell.metrics, strict=True)
        ]

    @cached_property
    def _layout(self) -> Layout:
        nodes = []
        for (node, *_), is_held in zip(self._found, self.held, strict=True):
            same_as = node.same_as if is_held and node.same_as >= 0 and self.held[node.same_as] else -1
            nodes.append(Node(node.path, node.metric, same_as, node.states if is_held and same_as < 0 else ()))
        return _layout_of(tuple(nodes))

    def packed(self, rank: int) -> Packed:
        """Return this rank's contribution, of metrics with data; raise ConfigurationError if it cannot be sent."""
        if self.fallback is not None or not any(self.held):
            return neutral(None)._replace(blob=self.in_full(rank))
        import torch

        sums = [torch.tensor([own.updates for own in self._found], dtype=torch.float64, device="cpu")]
        maxima = [torch.empty(0, dtype=torch.float64, device="cpu")]
        gathered: list[Any] = []
        for node, own in zip(self._layout.nodes, self._found, strict=True):
            for state in node.states:
                value = own.values[state.name]
                if state.kind not in IN_SUMS + IN_MAXIMA:
                    gathered.append(value)
                    continue
                numbers = value.reshape(-1).to(torch.float64)
                if state.kind in IN_MAXIMA:
                    is_nan = numbers.isnan()  # counted, because a maximum over ranks does not keep NaN
                    maxima.append((numbers if state.kind == "max" else -numbers).masked_fill(is_nan, -math.inf))
                    numbers = is_nan.to(torch.float64)
                sums.append(numbers)
        blob = pieces_of(gathered) if gathered else ()
        return Packed(self._layout.form, torch.cat(sums), torch.cat(maxima), blob)

    def in_full(self, rank: int) -> list[Bytes]:
        """Return all states with data, and other attributes; raise ConfigurationError if they cannot be sent.

        Of a metric that cannot be merged, the values of this rank alone, if it was updated.
        """
        self.to_host()
        if self.fallback is not None:
            if not any(own.updates for own in self._found):
                return []
            states = [
                {
                    state.name: separated(own.values[state.name]) if state.kind == "cat" else own.values[state.name]
                    for state in own.node.states
                }
                for own in self._found
            ]
            updates, attributes = [own.updates for own in self._found], [own.attributes for own in self._found]
            return pieces_of([json.dumps(self._shell.compute(states, updates, attributes))])
        items: list[Any] = []
        for at, (node, own) in enumerate(zip(self._layout.nodes, self._found, strict=True)):
            if self.held[at]:
                values = [[state.name, state.kind, own.values[state.name]] for state in node.states]
                other = [[name, _on_host(value)] for name, value in own.attributes.items()]
                items.append([at, *node[:2], own.updates, other, values if node.same_as < 0 else node.same_as])
        return pieces_of([rank, items]) if items else []

    def compute(self, blobs: list[bytes], reduced: Reduced | None = None) -> dict[str, Any]:
        """Compute the value of all ranks together, from what ranks with data have sent, in their order.

        It is emptied, to release the bytes: the rest of what is `reduced`, otherwise states in full.

        Returns values by suffix of the logged name: `""` for a metric, `"/NAME"` for each name in the result of a
        collection or a wrapper. Tensors become nested lists of numbers: wandb would turn larger ones into histograms.
        Raises ConfigurationError if ranks do not fit, and any error of the metric's `compute`, as of some without data.
        """
        if self.fallback is not None:
            try:
                ranks = [dict(json.loads(text)) for (text,) in map(decode, blobs)]
            except (ValueError, TypeError) as error:
                raise ConfigurationError(f"The values of a metric that a rank sent cannot be read: {error}.") from error
            names = dict.fromkeys(name for values in ranks for name in values)
            return {name: _mean([values[name] for values in ranks if name in values]) for name in names}
        received = (decode(blobs.pop(0)) for _ in range(len(blobs)))
        metrics = self._shell.metrics
        if reduced is not None:
            merged = reduced_states(self._layout, reduced, list(received), metrics)
        else:
            merged = states_in_full([own.node for own in self._found], received, metrics)
        attributes = [
            own.attributes if held else sent or own.attributes
            for own, held, sent in zip(self._found, self.held, merged.attributes, strict=True)
        ]
        return self._shell.compute(merged.states, merged.updates, attributes)


# By id, because the hash of a metric depends on its states.
_shells: dict[int, tuple[weakref.ref[Any], tuple[tuple[str, type], ...], Shell]] = {}


def take_snapshot(value: Any) -> Snapshot:
    """Copy the states of a metric, a collection, or a tracker's newest metric, without waiting for devices.

    Leaves `value` unchanged; it may be updated or reset immediately afterwards. Raises ConfigurationError if it cannot
    be copied, which is done when it is logged for the first time.
    """
    import torch

    value = current(value)
    members = list(walk(value))
    fallback = next((reason for _, metric in members if (reason := obstacle(type(metric)))), None)
    found: list[Found] = []
    positions: dict[tuple[Any, ...], int] = {}
    for path, metric in members:
        pairs = states_of(metric)
        states = tuple(state for state, _ in pairs)
        identity = tuple((state, id(held)) for state, held in pairs) or (len(found),)
        same_as = positions.setdefault(identity, len(found))
        is_shared = same_as < len(found)
        copies = found[same_as].values if is_shared else {state.name: kept(state.kind, held) for state, held in pairs}
        node = Node(path, type(metric).__name__, same_as if is_shared else -1, states)
        found.append(Found(node, copies, updates_of(metric), attributes_of(metric)))
    structure, key = tuple((path, type(metric)) for path, metric in members), id(value)
    known = _shells.get(key)
    if fallback or known is None or known[0]() is not value or known[1] != structure:
        known = (weakref.ref(value, lambda _: _shells.pop(key, None)), structure, Shell(value))
        if not fallback:  # a fallback depends on more than states
            _shells[key] = known
    # An event on each device with copies, because the thread that reads them uses another stream.
    held = [
        one[-1:] if isinstance(one, list) else [one]
        for copies in (own.values for own in found)
        for one in copies.values()
    ]
    devices = {item.device for items in held for item in items if isinstance(item, torch.Tensor) and not item.is_cpu}
    return Snapshot(found, known[2], list(map(event_after, devices)), fallback)


_layout_of = lru_cache(maxsize=256)(Layout)  # its digest is expensive


def _size_of(value: Any) -> int:
    if (tensor := as_tensor(value)) is not None:
        return _OF_TENSOR + tensor.nbytes
    return sum(map(_size_of, value)) if isinstance(value, (list, tuple)) else 0


def _on_host(value: Any) -> Any:
    if (tensor := as_tensor(value)) is not None:
        return on_host(tensor)
    return type(value)(_on_host(item) for item in value) if isinstance(value, (list, tuple)) else value


def _mean(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return [_mean(parts) for parts in zip(*values, strict=True)]
    return sum(values) / len(values) if all(isinstance(value, (int, float)) for value in values) else math.nan
