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
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import as_tensor, event_after, has_passed, on_host, wait_for
from dist_wandb.payloads.framing import decode, encode, pieces_of
from dist_wandb.payloads.metric_merging import Layout, Merging, Node, Packed
from dist_wandb.payloads.metric_states import (
    IN_MAXIMA,
    IN_SUMS,
    Shell,
    State,
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

if TYPE_CHECKING:  # `import dist_wandb` imports neither
    from torch import Tensor


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

    states: tuple[State, ...]  # its own states in a fixed order
    values: dict[str, Any]  # copies of the states, by name
    updates: int  # how often it was updated
    attributes: dict[str, Any]  # its other attributes


class Snapshot:
    """The states of a logged metric or collection at the time of logging. Made by `take_snapshot`.

    All methods must be called on one background thread.
    """

    def __init__(
        self,
        layout: Layout,
        found: list[Found],  # of each node of the layout
        shell: Shell,
        marks: list[Any],  # of each device, the event after the copies of the states; `None` if it has no events
        fallback: str | None,  # why the value cannot be merged exactly, as a sentence; `None` if it can
    ) -> None:
        self.fallback = fallback
        self.metric: str = type(shell.value).__name__  # that was logged
        self._layout = layout
        self._own = layout
        self._found = found
        self._shell = shell
        self._marks: list[Any] | None = marks
        self._fits = [True] * len(found)

    @property
    def signature(self) -> str:
        """The layout as JSON text, equal on ranks whose contributions can be merged. See `Layout.parse`."""
        return self._layout.signature

    @property
    def is_loose(self) -> bool:
        """Whether some of this rank's states do not fit the layout and are sent in full."""
        return not all(self._fits)

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
                lists = {state.name for state in member.states if state.kind == "cat"}
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
            own.updates > 0 or not all(is_default(metric, state, own.values[state.name]) for state in own.states)
            for own, metric in zip(self._found, self._shell.metrics, strict=True)
        ]

    def adopt(self, signature: str) -> bool:
        """Use another rank's layout of the same metrics, if possible; return whether it is used now.

        Layouts of the same metrics can differ in the members of a collection that share their states. torchmetrics
        finds these compute groups at the first update, so a rank without updates does not know them. Layouts can also
        differ in the states, because some classes have different ones before their first update. A rank with data whose
        states do not fit sends them in full (`in_full`).
        """
        own, other = self._own, Layout.parse(signature)
        if own.is_local != other.is_local or [n[:2] for n in own.nodes] != [n[:2] for n in other.nodes]:
            return False
        self.to_host()
        fits = [True] * len(other.nodes)
        for position, node in enumerate(other.nodes if not own.is_local else ()):
            states = self._found[position].states
            if not self.held[position]:
                continue
            if node.same_as >= 0 and not (
                self.held[node.same_as] and _equal(self._found[position].values, self._found[node.same_as].values)
            ):
                return False
            if node.same_as < 0 and [state[:3] for state in states] != [state[:3] for state in node.states]:
                if {state.name for state in states} != {state.name for state in node.states} and node.states:
                    return False
                fits[position] = False
        self._layout, self._fits = other, fits
        return True

    def packed(self) -> Packed:
        """Return this rank's contribution, of metrics with data; raise ConfigurationError if it cannot be sent."""
        import torch

        self.to_host()
        has = [held and fits for held, fits in zip(self.held, self._fits, strict=True)]
        counts = [number for own, fits in zip(self._found, has, strict=True) for number in (own.updates, int(fits))]
        sums = [torch.tensor(counts, dtype=torch.float64, device="cpu")]
        maxima = [torch.empty(0, dtype=torch.float64, device="cpu")]
        gathered: list[Any] = []
        if self._layout.is_local:  # the values of this rank alone; none if no metric was updated
            updates = [own.updates for own in self._found]
            values = [
                {
                    state.name: separated(own.values[state.name]) if state.kind == "cat" else own.values[state.name]
                    for state in own.states
                }
                for own in self._found
            ]
            attributes = [own.attributes for own in self._found]
            gathered.append(json.dumps(self._shell.compute(values, updates, attributes) if any(updates) else {}))
        for node, own, contributes in zip(self._layout.nodes, self._found, has, strict=True):
            for state in node.states:
                value = own.values[state.name] if contributes else None
                if state.kind in IN_SUMS + IN_MAXIMA:
                    to_sum, to_maximise = _numbers(state, value)
                    sums.append(to_sum)
                    maxima += to_maximise
                else:
                    gathered.append(value)
        return Packed(torch.cat(sums), torch.cat(maxima), pieces_of(gathered) if self._layout.has_blob else ())

    def in_full(self, rank: int) -> bytes:
        """Return bytes to add if the computing rank has no data or a state does not fit; or ConfigurationError."""
        items = []
        for position, own in enumerate(self._found):
            if self.held[position]:
                attributes = [[name, _on_host(value)] for name, value in own.attributes.items()]
                states = () if self._fits[position] else own.states
                values = [[state.name, state.kind, own.values[state.name]] for state in states]
                items.append([position, attributes, values])
        return encode([rank, items])

    def compute(
        self, sums: Tensor, maxima: Tensor, blobs: Iterable[bytes], in_full: Sequence[bytes] = ()
    ) -> dict[str, Any]:
        """Compute the value of all ranks together, from the exchanged `Packed` and `in_full`, in the order of ranks.

        Returns values by suffix of the logged name: `""` for a metric, `"/NAME"` for each name in the result of a
        collection or a wrapper. Tensors become nested lists of numbers: wandb would turn larger ones into histograms.
        Raises ConfigurationError if ranks do not fit, and any error of the metric's `compute`, as of some without data.
        """
        decoded = [decode(blob) if blob else None for blob in blobs]
        if self._layout.is_local:
            try:
                ranks = [dict(json.loads(text)) for (text,) in filter(None, decoded)]
            except (ValueError, TypeError) as error:
                raise ConfigurationError(f"The values of a metric that a rank sent cannot be read: {error}.") from error
            names = dict.fromkeys(name for values in ranks for name in values)
            return {name: _mean([values[name] for values in ranks if name in values]) for name in names}
        merging = Merging(self._layout, sums, maxima, decoded, in_full)
        attributes = [
            own.attributes if held else merging.attributes(position) or own.attributes
            for position, (own, held) in enumerate(zip(self._found, self.held, strict=True))
        ]
        return self._shell.compute(merging.states(self._shell.metrics), merging.updates, attributes)


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
    nodes: list[Node] = []
    found: list[Found] = []
    positions: dict[tuple[Any, ...], int] = {}
    for path, metric in members:
        pairs = states_of(metric)
        states = tuple(state for state, _ in pairs)
        identity = tuple((state, id(held)) for state, held in pairs) or (len(nodes),)
        same_as = positions.setdefault(identity, len(nodes))
        is_shared = same_as < len(nodes)
        sent = () if is_shared or fallback else states
        nodes.append(Node(path, type(metric).__name__, same_as if is_shared and not fallback else -1, sent))
        copies = found[same_as].values if is_shared else {state.name: kept(state.kind, held) for state, held in pairs}
        found.append(Found(states, copies, updates_of(metric), attributes_of(metric)))
    structure, key = tuple((path, type(metric)) for path, metric in members), id(value)
    known = _shells.get(key)
    if fallback or known is None or known[0]() is not value or known[1] != structure:
        known = (weakref.ref(value, lambda _: _shells.pop(key, None)), structure, Shell(value))
        if not fallback:  # a fallback depends on more than states
            _shells[key] = known
    is_tentative = not any(member.updates for member in found)
    layout = _layout_of(tuple(nodes), fallback is not None, is_tentative)
    # An event on each device with copies, because the thread that reads them uses another stream.
    held = [
        one[-1:] if isinstance(one, list) else [one]
        for copies in (own.values for own in found)
        for one in copies.values()
    ]
    devices = {item.device for items in held for item in items if isinstance(item, torch.Tensor) and not item.is_cpu}
    return Snapshot(layout, found, known[2], list(map(event_after, devices)), fallback)


@lru_cache(maxsize=256)
def _layout_of(nodes: tuple[Node, ...], is_local: bool, is_tentative: bool) -> Layout:
    # cached, because its signature is expensive
    return Layout(nodes, is_local=is_local, is_tentative=is_tentative)


def _numbers(state: State, value: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Return the numbers of a state to sum, and those for the maximum; neutral ones without a value."""
    import torch

    if value is None:
        nothing = torch.zeros(state.numel, dtype=torch.float64, device="cpu")
        return nothing, [torch.full_like(nothing, -math.inf)] if state.kind in IN_MAXIMA else []
    numbers = value.reshape(-1).to(torch.float64)
    if state.kind in IN_SUMS:
        return numbers, []
    is_nan = numbers.isnan()  # counted, because a maximum over ranks does not keep NaN
    return is_nan.to(torch.float64), [(numbers if state.kind == "max" else -numbers).masked_fill(is_nan, -math.inf)]


def _size_of(value: Any) -> int:
    if (tensor := as_tensor(value)) is not None:
        return _OF_TENSOR + tensor.nbytes
    return sum(map(_size_of, value)) if isinstance(value, (list, tuple)) else 0


def _on_host(value: Any) -> Any:
    if (tensor := as_tensor(value)) is not None:
        return on_host(tensor)
    return type(value)(_on_host(item) for item in value) if isinstance(value, (list, tuple)) else value


def _equal(left: Any, right: Any) -> bool:
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[name]) for name, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return type(left) is type(right) and bool(left == right)


def _mean(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return [_mean(parts) for parts in zip(*values, strict=True)]
    return sum(values) / len(values) if all(isinstance(value, (int, float)) for value in values) else math.nan
