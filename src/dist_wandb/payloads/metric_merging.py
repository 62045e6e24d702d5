"""Merging of the contributions of ranks into the states of a single metric that has seen all data.

A rank without data contributes nothing, whatever its states are: torchmetrics' defaults may have another shape than
states after an update, and a mean would count them. If all ranks have the same layout, most numbers arrive as sums and
maxima over ranks. A rank whose states do not fit the layout sends them in full, in addition to the numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.framing import Bytes, decode, dtype_of
from dist_wandb.payloads.metric_states import IN_MAXIMA, IN_SUMS, State, is_a, is_stacked, reduction_of, separated

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

_MOST_NUMBERS = 2**28  # maximum numbers of a logged value: 2 GiB, which all ranks exchange
_KINDS = frozenset((*IN_SUMS, *IN_MAXIMA, "cat", "list", "stack"))
_MOMENTS = ("total", "mean_val", "var_val", "min_val", "max_val", "target_squared")


class Packed(NamedTuple):
    """The contribution of one rank."""

    sums: Tensor  # numbers to sum over ranks; one-dimensional, float64, on the CPU
    maxima: Tensor  # numbers whose maximum over ranks is taken; in the same form
    blob: Sequence[Bytes]  # bytes to collect in the order of ranks, in pieces that are the memory of states


class Node(NamedTuple):
    """A metric, or one of the metrics in a collection or a wrapper."""

    path: str  # path of the metric in the logged object
    metric: str  # name of its class
    same_as: int  # index of an earlier node with identical states, which are sent only once; -1 if there is none
    states: tuple[State, ...]  # its own states in a fixed order


class Layout:
    """The positions of states in the exchanged numbers of one logged value."""

    def __init__(self, nodes: tuple[Node, ...], *, is_local: bool, is_tentative: bool = False) -> None:
        self.nodes = nodes
        self.is_local = is_local  # whether each rank computes its own value, which is exchanged in place of states
        self.is_tentative = is_tentative  # whether it was made without data, which may change the states' shapes
        states = [state for node in nodes for state in node.states]
        # The first two numbers of each node are its number of updates, and the number of ranks with data whose states
        # fit the layout. The NaNs of maxima and minima are counted in the sums.
        self.sum_sizes: list[int] = [2 * len(nodes), *(one.numel for one in states if one.kind in IN_SUMS + IN_MAXIMA)]
        self.max_sizes: list[int] = [state.numel for state in states if state.kind in IN_MAXIMA]
        self.sums: int = sum(self.sum_sizes)
        self.maxima: int = sum(self.max_sizes)
        self.gathered: int = sum(state.kind not in IN_SUMS + IN_MAXIMA for state in states)
        self.has_blob: bool = is_local or self.gathered > 0

    @cached_property
    def signature(self) -> str:
        return json.dumps([self.is_local, self.nodes, self.is_tentative], separators=(",", ":"))

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, signature: str) -> Layout:
        """Return the layout of a signature; raise ConfigurationError if it is none."""
        try:
            is_local, nodes, is_tentative = json.loads(signature)
            found = tuple(_node_of(position, *node) for position, node in enumerate(nodes))
            layout = cls(found, is_local=bool(is_local), is_tentative=bool(is_tentative))
            if layout.sums + layout.maxima > _MOST_NUMBERS:
                raise ValueError(f"it has more than {_MOST_NUMBERS:,} numbers")  # noqa: TRY301  # ends below
            return layout  # noqa: TRY300
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"{signature[:100]!r} is not a signature of a metric: {error}.") from error

    def holders(self, sums: Tensor) -> list[float]:
        """Return for each node the number of ranks with data whose states fit, given the sums over ranks."""
        return list(sums[1 : 2 * len(self.nodes) : 2].tolist())

    def neutral(self) -> Packed:
        import torch

        sums = torch.zeros(self.sums, dtype=torch.float64, device="cpu")
        return Packed(sums, torch.full((self.maxima,), -math.inf, dtype=torch.float64, device="cpu"), ())


def _node_of(position: int, path: Any, metric: Any, same_as: Any, states: Any) -> Node:
    if not isinstance(path, str) or not isinstance(metric, str):
        raise TypeError("a metric has no name")
    if type(same_as) is not int or not -1 <= same_as < position:
        raise ValueError("a metric shares its states with an unknown one")
    for name, kind, shape, dtype in states:
        if not isinstance(name, str) or not isinstance(dtype, str) or kind not in _KINDS:
            raise ValueError("a state has no name, or is of an unknown kind")
        if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) > _MOST_NUMBERS:
            raise ValueError(f"a state has no shape, or more than {_MOST_NUMBERS:,} numbers")
    return Node(
        path, metric, same_as, tuple(State(name, kind, tuple(shape), dtype) for name, kind, shape, dtype in states)
    )


class Part(NamedTuple):
    """A state of one rank."""

    order: int  # the rank's position in the order of ranks
    rank: int  # index of the rank in the job, for messages
    value: Any  # the state, in the form of `Snapshot`


class InFull(NamedTuple):
    """The states and attributes of one node that a rank sends in addition to the reduced numbers."""

    position: int  # index of the node in the layout
    attributes: dict[str, Any]  # other attributes of the metric
    states: list[tuple[State, Part]]  # its states in full if they do not fit the layout; otherwise empty


class Merging:
    """The contributions of all ranks to one logged value. Raises ConfigurationError if they do not fit the layout."""

    def __init__(
        self,
        layout: Layout,
        sums: Tensor,  # over ranks, one-dimensional, like the maxima
        maxima: Tensor,
        gathered: Sequence[Sequence[Any] | None],  # states, in the order of ranks; `None` for a rank without any
        in_full: Sequence[bytes],  # of `Snapshot.in_full`, in the order of ranks
    ) -> None:
        if any(items is not None and len(items) != layout.gathered for items in gathered):
            raise ConfigurationError(
                f"The gathered states of {layout.nodes[0].metric} do not fit. Run the same code on all ranks."
            )
        self._layout = layout
        self._sums, self._maxima = _pieces(sums, layout.sum_sizes), _pieces(maxima, layout.max_sizes)
        self._columns = iter(range(layout.gathered))
        self._gathered = gathered
        self._in_full: list[InFull] = []
        for order, blob in enumerate(in_full):
            rank, nodes = decode(blob) if blob else (-1, ())
            for position, attributes, states in nodes:
                values = [(State(name, kind), Part(order, rank, value)) for name, kind, value in states]
                self._in_full.append(InFull(position, dict(attributes), values))
        counts = next(self._sums).tolist()
        self.updates: list[int] = list(map(int, counts[::2]))
        self._holders = counts[1::2]

    def attributes(self, position: int) -> dict[str, Any] | None:
        """Return the other attributes of a node on the first rank that has sent them, if any."""
        return next((one.attributes for one in self._in_full if one.position == position), None)

    def states(self, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
        """Return each node's merged states, without those that no rank has; raise if they do not fit."""
        restored: list[dict[str, Any]] = []
        for position, (node, metric) in enumerate(zip(self._layout.nodes, metrics, strict=True)):
            restored.append(restored[node.same_as] if node.same_as >= 0 else self._node(position, node, metric))
        return restored

    def _node(self, position: int, node: Node, metric: Metric) -> dict[str, Any]:
        in_full: dict[str, list[Part]] = {}
        kinds = {state.name: state for state in node.states}
        for one in self._in_full:
            for state, part in one.states if one.position == position else ():
                in_full.setdefault(state.name, []).append(part)
                kinds.setdefault(state.name, state)  # a state that exists only after the first update
        merged = {}
        for name, state in kinds.items():
            parts, is_sent = in_full.get(name, []), state in node.states
            if state.kind in IN_SUMS + IN_MAXIMA:
                reduced, holders = self._reduced(position, state) if is_sent else (None, 0)
                merged[name] = _from_numbers(state, reduced, holders, parts, metric)
            else:
                merged[name] = _from_parts(state, [*self._parts(state), *parts] if is_sent else parts, metric)
        states = {name: value for name, value in merged.items() if value is not None}
        # With three ranks or more, this class raises an error or uses only two of them.
        is_broken = is_a(type(metric), "NormalizedRootMeanSquaredError")
        if is_broken and all(is_stacked(metric, one, states.get(one)) for one in _MOMENTS):
            # Merge the moments of several ranks, one row for each (Chan, Golub and LeVeque, 1979).
            total, mean = states["total"], states["mean_val"]
            states |= {name: states[name].sum(0) for name in ("total", "target_squared")}
            states |= {"min_val": states["min_val"].amin(0), "max_val": states["max_val"].amax(0)}
            joint = states["mean_val"] = (total * mean).sum(0) / states["total"]
            states["var_val"] = (states["var_val"] + total * (mean - joint) ** 2).sum(0)
        return states

    def _reduced(self, position: int, state: State) -> tuple[Tensor | None, int]:
        """Return a state reduced over the ranks with data whose states fit the layout, and the number of these."""
        if state.kind in IN_SUMS:
            total = next(self._sums)
        else:
            nans, largest = next(self._sums), next(self._maxima)  # a minimum is a maximum of negated numbers
            total = (largest if state.kind == "max" else -largest).masked_fill(nans > 0, math.nan)
        holders = int(self._holders[position])
        return total.reshape(state.shape) if holders else None, holders

    def _parts(self, state: State) -> Iterator[Part]:
        column = next(self._columns)
        for order, items in enumerate(self._gathered):
            value = None if items is None else items[column]
            if state.kind == "stack" and value is not None and getattr(value, "shape", None) != state.shape:
                raise ConfigurationError(
                    f"State {state.name!r} that rank {order} sent is not a tensor of shape {state.shape}, which its "
                    "layout has. Install the same version of dist_wandb on all ranks."
                )
            if value is not None:
                yield Part(order, order, value)


def _from_numbers(
    state: State, reduced: Tensor | None, holders: int, in_full: Sequence[Part], metric: Metric
) -> Tensor | None:
    """Merge a state from the reduced numbers and from ranks that sent it in full; `None` if no rank has data."""
    import torch

    if reduced is not None and not in_full:  # the usual case
        return (reduced / holders if state.kind == "mean" else reduced).to(dtype_of(state.dtype), copy=True)
    parts = [] if reduced is None else [reduced]
    for part in in_full:
        _check_shape(state, part, parts, metric)
        parts.append(part.value.to(torch.float64))
    if not parts:
        return None
    joint = torch.stack(parts)
    if state.kind in IN_SUMS:
        joint = joint.sum(0) / (holders + len(in_full) if state.kind == "mean" else 1)
    else:
        joint = joint.amax(0) if state.kind == "max" else joint.amin(0)
    return joint.to(dtype_of(state.dtype) if holders else in_full[0].value.dtype)


def _from_parts(state: State, parts: Sequence[Part], metric: Metric) -> Any:
    """Merge a gathered state from the ranks that have data; `None` if there are none."""
    import torch

    parts = sorted(parts, key=lambda part: part.order)
    if not parts:
        return None
    if state.kind == "stack":  # as by torchmetrics' synchronisation; the state of a single rank is unchanged
        tensors: list[Tensor] = []
        for part in parts:
            _check_shape(state, part, tensors, metric)
            tensors.append(part.value)
        reduction = reduction_of(metric, state.name)
        if reduction is None and len(tensors) == 1:
            return tensors[0]
        return torch.stack(tensors) if reduction is None else reduction(torch.stack(tensors))
    merged: list[Any] = []
    for part in parts:
        if not isinstance(part.value, list) or (state.kind == "cat" and not _is_joined(part.value)):
            raise ConfigurationError(
                f"State {state.name!r} of {type(metric).__name__} is not a list of tensors on rank {part.rank}. Give "
                "the metric the same arguments on all ranks."
            )
        merged += separated(part.value) if state.kind == "cat" else part.value
    reduction = reduction_of(metric, state.name) if state.kind == "list" else None
    return reduction(merged) if merged and reduction is not None else merged


def _check_shape(state: State, part: Part, others: Sequence[Tensor], metric: Metric) -> None:
    shape = getattr(part.value, "shape", None)
    if shape is None or (others and others[0].shape != shape):
        here = "not a tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
        there = f"one of shape {tuple(others[0].shape)}" if others else "a tensor"
        raise ConfigurationError(
            f"State {state.name!r} of {type(metric).__name__} is {here} on rank {part.rank}, but {there} on "
            "another, so they cannot be merged. Give the metric the same arguments, and data of the same shape, on "
            "all ranks."
        )


def _is_joined(item: Sequence[Any]) -> bool:
    """Return whether a list is a result of `metric_states.joined`."""
    import torch

    if not item:
        return True
    if not all(isinstance(part, torch.Tensor) for part in item) or [part.ndim > 0 for part in item] != [True, True]:
        return False
    return item[1].dtype is torch.int64 and int(item[1].abs().sum()) == len(item[0])


def _pieces(numbers: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield numbers[start : start + size]
        start += size
