"""Metrics of torchmetrics as contributions to an exchange between ranks: snapshot, pack, merge, compute.

On the training thread `take_snapshot` copies the states of a metric and leaves the user's object as it is. Elsewhere
the snapshot becomes numbers to be summed over ranks, numbers whose maximum is taken, and bytes to be gathered. What
comes back is put into a private copy of the metric, which computes the value that torchmetrics' own synchronisation
leads to. Nothing here talks to other ranks, and nothing is pickled.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.blob import decode, dtype_of, encode
from dist_wandb.errors import ConfigurationError
from dist_wandb.metric_states import (
    IN_MAXIMA,
    IN_SUMS,
    Shell,
    State,
    joined,
    kept,
    merged,
    obstacle,
    states_of,
    updates_of,
    walk,
)

if TYPE_CHECKING:  # `import dist_wandb` brings neither
    import torch
    from torch import Tensor
    from torchmetrics import Metric


def is_metric(value: object) -> bool:
    """Whether a value is a `torchmetrics.Metric` or a `MetricCollection`. It does not import torchmetrics."""
    if isinstance(value, (int, float, str)):
        return False
    module = sys.modules.get("torchmetrics")
    known = (getattr(module, "Metric", None), getattr(module, "MetricCollection", None))
    return None not in known and isinstance(value, known)  # type: ignore[arg-type]  # both are types here


class Packed(NamedTuple):
    """What one rank contributes.

    Args:
        sums: Numbers to be summed over ranks; flat, float64, on the CPU.
        maxima: Numbers whose maximum over ranks is to be taken; the same.
        blob: Bytes to be gathered, in the order of ranks.
    """

    sums: Tensor
    maxima: Tensor
    blob: bytes


class _Node(NamedTuple):
    """A metric, or one of the metrics in a collection or a wrapper.

    Args:
        path: Where it is.
        metric: Name of its class.
        same_as: Position of the node that has the very same states, which are sent once; -1 where there is none.
        states: Its own states in a fixed order.
    """

    path: str
    metric: str
    same_as: int
    states: tuple[State, ...]


class Layout:
    """Which state is where in what the ranks exchange for one logged value.

    Args:
        nodes: The metrics whose states are exchanged.
        is_local: Whether every rank computes for itself, and values are exchanged in place of states.
    """

    def __init__(self, nodes: tuple[_Node, ...], *, is_local: bool) -> None:
        self.nodes = nodes
        self.is_local = is_local
        states = [state for node in nodes for state in node.states]
        # First come the counts of updates, one of each node. NaNs of extrema are counted among the sums.
        self.sum_sizes = [len(nodes)] + [state.numel for state in states if state.kind in IN_SUMS + IN_MAXIMA]
        self.max_sizes = [state.numel for state in states if state.kind in IN_MAXIMA]
        self.gathered = sum(state.kind not in IN_SUMS + IN_MAXIMA for state in states)

    @property
    def sums(self) -> int:
        """Number of numbers to be summed."""
        return sum(self.sum_sizes)

    @property
    def maxima(self) -> int:
        """Number of numbers whose maximum is taken."""
        return sum(self.max_sizes)

    @property
    def has_blob(self) -> bool:
        """Whether ranks have bytes to be gathered."""
        return self.is_local or self.gathered > 0

    @cached_property
    def signature(self) -> str:
        """The layout as JSON text."""
        return json.dumps([self.is_local, self.nodes], separators=(",", ":"))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, signature: str) -> Layout:
        """The layout that a signature names.

        Raises:
            ConfigurationError: The text is no signature.
        """
        try:
            is_local, nodes = json.loads(signature)
            return cls(
                tuple(
                    _Node(path, metric, int(same_as), tuple(State(n, k, tuple(s), d) for n, k, s, d in states))
                    for path, metric, same_as, states in nodes
                ),
                is_local=bool(is_local),
            )
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{signature[:100]!r} is no signature of a metric: {error}.") from error

    def neutral(self) -> Packed:
        """What a rank that has no such metric contributes: nothing."""
        import torch

        sums = torch.zeros(self.sums, dtype=torch.float64, device="cpu")
        return Packed(sums, torch.full((self.maxima,), -math.inf, dtype=torch.float64, device="cpu"), b"")


class Snapshot:
    """The states of one logged metric or collection at the time when it was logged. Made by `take_snapshot`.

    Everything but `take_snapshot` belongs on one background thread.

    Args:
        layout: Where the states are in the exchange.
        states: The states of each of its nodes.
        updates: How often each of its nodes was updated.
        shell: The private copy that computes.
        marks: Recorded events of devices, after which the states are there.
        fallback: Why the value cannot be merged exactly, as a sentence; `None` where it can.
    """

    def __init__(
        self,
        layout: Layout,
        states: list[dict[str, Any]],
        updates: list[int],
        shell: Shell,
        marks: list[torch.Event],
        fallback: str | None,
    ) -> None:
        self.fallback = fallback
        self._layout = layout
        self._states = states
        self._updates = updates
        self._shell = shell
        self._marks: list[torch.Event] | None = marks

    @property
    def signature(self) -> str:
        """The layout as JSON text: equal on ranks whose contributions can be merged. See `Layout.parse`."""
        return self._layout.signature

    def is_ready(self) -> bool:
        """Whether the states can be had without waiting for a device."""
        return all(mark.query() for mark in self._marks or ())

    def to_host(self) -> None:
        """Bring the states to the CPU; waits for their devices. The other methods do so where it is not done yet."""
        if self._marks is None:
            return
        for mark in self._marks:
            mark.synchronize()
        on_host: dict[int, dict[str, Any]] = {}
        for node, states in zip(self._layout.nodes, self._states, strict=True):
            if id(states) not in on_host:
                lists = {state.name for state in node.states if state.kind == "cat"}
                on_host[id(states)] = {
                    name: _on_host(joined(value) if name in lists else value) for name, value in states.items()
                }
        self._states = [on_host[id(states)] for states in self._states]
        self._marks = None

    def adopt(self, signature: str) -> bool:
        """Take over another rank's layout, if this rank's states fit into it.

        Layouts of the same metrics can differ in which of a collection's members share their states, as torchmetrics
        finds its compute groups at the first update: a rank without any update does not know them.

        Args:
            signature: The other rank's signature.

        Returns:
            Whether the snapshot has that signature now.
        """
        mine, other = self._layout, Layout.parse(signature)
        if mine.is_local != other.is_local or [n[:2] for n in mine.nodes] != [n[:2] for n in other.nodes]:
            return False
        self.to_host()
        for position, (own, node) in enumerate(zip(mine.nodes, other.nodes, strict=True)):
            if node.same_as < 0:
                states = own.states if own.same_as < 0 else mine.nodes[own.same_as].states
                fits = [state[:3] for state in states] == [state[:3] for state in node.states]
            else:
                fits = _equal(self._states[position], self._states[node.same_as])
            if not fits:
                return False
        self._layout = other
        return True

    def packed(self) -> Packed:
        """What this rank contributes to the exchange.

        Raises:
            ConfigurationError: A state holds something that cannot be sent.
        """
        import torch

        self.to_host()
        sums = [torch.tensor(self._updates, dtype=torch.float64, device="cpu")]
        maxima = [torch.empty(0, dtype=torch.float64, device="cpu")]
        gathered: list[Any] = [json.dumps(self._local_values())] if self._layout.is_local else []
        for node, states in zip(self._layout.nodes, self._states, strict=True):
            for state in node.states:
                value = states[state.name]
                if state.kind in IN_SUMS:
                    sums.append(value.reshape(-1).to(torch.float64))
                elif state.kind in IN_MAXIMA:
                    numbers = value.reshape(-1).to(torch.float64)
                    is_nan = numbers.isnan()  # a maximum over ranks does not keep it
                    sums.append(is_nan.to(torch.float64))
                    maxima.append((numbers if state.kind == "max" else -numbers).masked_fill(is_nan, -math.inf))
                else:
                    gathered.append(value)
        return Packed(torch.cat(sums), torch.cat(maxima), encode(gathered) if self._layout.has_blob else b"")

    def compute(self, sums: Tensor, maxima: Tensor, blobs: Sequence[bytes], voices: int) -> dict[str, Any]:
        """The value of all ranks together.

        Args:
            sums: The sums over ranks.
            maxima: The maxima over ranks.
            blobs: The blobs in the order of ranks; those that are empty do not count.
            voices: How many ranks contributed.

        Returns:
            Values by what is to be appended to the logged name: `""` for a metric, `"/NAME"` for each name in what a
            collection (or a wrapper) computes. Tensors become numbers and nested lists of numbers: wandb keeps these
            as they are, while it would turn larger tensors into histograms.

        Raises:
            ConfigurationError: A blob that cannot be understood.
            Exception: What the metric's own `compute` raises, as some do where no rank has data.
        """
        decoded = [decode(blob) for blob in blobs if blob]
        if self._layout.is_local:
            return _averaged(decoded)
        if any(len(items) != self._layout.gathered for items in decoded) or (self._layout.gathered and not decoded):
            name = self._layout.nodes[0].metric
            raise ConfigurationError(f"The gathered states of {name} do not fit. Run the same code on all ranks.")
        columns = iter(list(zip(*decoded, strict=True)))
        pieces, extrema = _pieces(sums, self._layout.sum_sizes), _pieces(maxima, self._layout.max_sizes)
        updates = [int(count) for count in next(pieces)]
        restored: list[dict[str, Any]] = []
        for node, metric in zip(self._layout.nodes, self._shell.metrics, strict=True):
            states: dict[str, Any] = {} if node.same_as < 0 else restored[node.same_as]
            for state in node.states:
                if state.kind in IN_SUMS:
                    numbers = next(pieces) / (voices if state.kind == "mean" else 1)
                elif state.kind in IN_MAXIMA:
                    nans, largest = next(pieces) > 0, next(extrema)
                    numbers = (largest if state.kind == "max" else -largest).masked_fill(nans, math.nan)
                else:
                    states[state.name] = merged(state, next(columns), metric)
                    continue
                states[state.name] = numbers.reshape(state.shape).to(dtype_of(state.dtype))
            restored.append(states)
        return self._shell.compute(restored, updates)

    def _local_values(self) -> dict[str, Any]:
        """What this rank computes by itself; nothing where nothing was updated."""
        return self._shell.compute(self._states, self._updates) if any(self._updates) else {}


# By id, as the hash of a metric depends on its states.
_shells: dict[int, tuple[weakref.ref[Any], tuple[tuple[str, type], ...], Shell]] = {}


def take_snapshot(value: Any) -> Snapshot:
    """Copy the states of a metric or collection. Waits for no device and leaves `value` as it is.

    Args:
        value: A `torchmetrics.Metric` or `MetricCollection`. It may be updated or reset right afterwards.

    Raises:
        ConfigurationError: The object cannot be copied, which is tried when it is logged for the first time.
    """
    found = list(walk(value))
    fallback = next((reason for _, metric in found if (reason := obstacle(type(metric)))), None)
    nodes: list[_Node] = []
    copies: list[dict[str, Any]] = []
    positions: dict[tuple[Any, ...], int] = {}
    for path, metric in found:
        states = states_of(metric)
        identity = tuple((state, id(held)) for state, held in states) or (len(nodes),)
        same_as = positions.setdefault(identity, len(nodes))
        is_shared = same_as < len(nodes)
        sent = () if is_shared or fallback else tuple(state for state, _ in states)
        nodes.append(_Node(path, type(metric).__name__, same_as if is_shared and not fallback else -1, sent))
        copies.append(copies[same_as] if is_shared else {state.name: kept(state.kind, held) for state, held in states})
    shell = Shell(value) if fallback else _shell_of(value, found)  # a fallback depends on more than states
    layout = _layout_of(tuple(nodes), fallback is not None)
    updates = [updates_of(metric) for _, metric in found]
    return Snapshot(layout, copies, updates, shell, _marks(copies), fallback)


@lru_cache(maxsize=256)
def _layout_of(nodes: tuple[_Node, ...], is_local: bool) -> Layout:
    """One layout for equal nodes, as its signature takes longer than all else."""
    return Layout(nodes, is_local=is_local)


def _shell_of(value: Any, found: Sequence[tuple[str, Metric]]) -> Shell:
    structure = tuple((path, type(metric)) for path, metric in found)
    known = _shells.get(id(value))
    if known is None or known[0]() is not value or known[1] != structure:
        key = id(value)
        known = (weakref.ref(value, lambda _: _shells.pop(key, None)), structure, Shell(value))
        _shells[key] = known
    return known[2]


def _marks(copies: Sequence[Mapping[str, Any]]) -> list[torch.Event]:
    """For each device that has copies, an event after which they are there: another thread has another stream."""
    import torch

    held = [value[-1:] if isinstance(value, list) else [value] for states in copies for value in states.values()]
    devices = {item.device for items in held for item in items if isinstance(item, torch.Tensor) and not item.is_cpu}
    accelerator = torch.accelerator.current_accelerator() if devices else None
    marks = [torch.Event(device) for device in devices if accelerator is not None and device.type == accelerator.type]
    for mark in marks:
        mark.record()
    return marks


def _pieces(numbers: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield numbers[start : start + size]
        start += size


def _on_host(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
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


def _averaged(blobs: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """The means of what ranks computed by themselves, each over the ranks that have it."""
    try:
        ranks = [dict(json.loads(text)) for (text,) in blobs]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"The values of a metric that a rank sent cannot be read: {error}.") from error
    names = dict.fromkeys(name for values in ranks for name in values)
    return {name: _mean([values[name] for values in ranks if name in values]) for name in names}


def _mean(values: Sequence[Any]) -> Any:
    if all(isinstance(value, list) and len(value) == len(values[0]) for value in values):
        return [_mean(parts) for parts in zip(*values, strict=True)]
    return sum(values) / len(values) if all(isinstance(value, (int, float)) for value in values) else math.nan
