"""Merging of the contributions of ranks into the states of a single metric that has seen all data.

A rank without data contributes nothing, whatever its states are: torchmetrics' defaults may have another shape than
states after an update, and a mean would count them. If all ranks with data have the same layout, most numbers arrive as
sums and maxima over ranks. Otherwise, they send their states in full: some classes have other states after their first
update, and members of a collection that share their states on one rank may not on another.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.framing import Bytes, dtype_of
from dist_wandb.payloads.metric_states import IN_MAXIMA, IN_SUMS, State, is_a, is_stacked, reduction_of, separated

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

_MOMENTS = ("total", "mean_val", "var_val", "min_val", "max_val", "target_squared")


class Form(NamedTuple):
    """What ranks tell each other of a layout."""

    digest: float  # an integer
    sums: int  # how many numbers there are
    maxima: int
    has_blob: bool


class Packed(NamedTuple):
    """The contribution of one rank."""

    form: Form | None  # equal on ranks whose numbers can be reduced; `None`: without data, or the states are in full
    sums: Tensor  # numbers to sum over ranks; one-dimensional, float64, on the CPU
    maxima: Tensor  # numbers whose maximum over ranks is taken; in the same form
    blob: Sequence[Bytes]  # bytes to collect in the order of ranks, in pieces that are the memory of states


class Reduced(NamedTuple):
    """What ranks with equal forms have packed, reduced over all ranks."""

    sums: Tensor
    maxima: Tensor
    holders: int  # how many ranks have data


def neutral(form: Form | None) -> Packed:
    """Return the contribution of a rank without data."""
    import torch

    sums, maxima = (0, 0) if form is None else form[1:3]
    zeros = torch.zeros(sums, dtype=torch.float64, device="cpu")
    return Packed(None, zeros, torch.full((maxima,), -math.inf, dtype=torch.float64, device="cpu"), ())


class Node(NamedTuple):
    """A metric, or one of the metrics in a collection or a wrapper."""

    path: str  # path of the metric in the logged object
    metric: str  # name of its class
    same_as: int  # index of an earlier node with identical states, which are sent only once; -1 if there is none
    states: tuple[State, ...]  # its own states in a fixed order; none without data


class Layout:
    """The positions of states in the exchanged numbers of one logged value."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        states = [state for node in nodes for state in node.states]
        # The first numbers are those of updates. The NaNs of maxima and minima are counted in the sums.
        self.sum_sizes: list[int] = [len(nodes), *(one.numel for one in states if one.kind in IN_SUMS + IN_MAXIMA)]
        self.max_sizes: list[int] = [state.numel for state in states if state.kind in IN_MAXIMA]
        self.gathered: int = sum(state.kind not in IN_SUMS + IN_MAXIMA for state in states)
        digest = float(int.from_bytes(hashlib.sha256(json.dumps(nodes).encode()).digest()[:6], "little"))
        self.form = Form(digest, sum(self.sum_sizes), sum(self.max_sizes), self.gathered > 0)


class Merged(NamedTuple):
    """What a metric needs to compute the value of all ranks: for each node."""

    states: list[dict[str, Any]]  # without those that no rank has
    updates: list[int]
    attributes: list[dict[str, Any]]  # of the first rank that has sent them


def reduced_states(
    layout: Layout,
    reduced: Reduced,
    gathered: Sequence[Sequence[Any]],  # the other states of ranks with data, in their order
    metrics: Sequence[Metric],  # of the nodes
) -> Merged:
    """Merge the states of ranks with the same layout. Raises ConfigurationError if they do not fit it."""
    if any(len(items) != layout.gathered for items in gathered):
        raise _misfit(layout.nodes[0].metric)
    totals = iter(reduced.sums.split_with_sizes(layout.sum_sizes))
    largest = iter(reduced.maxima.split_with_sizes(layout.max_sizes))
    updates, columns = list(map(int, next(totals).tolist())), iter(zip(*gathered, strict=True))
    merged: list[dict[str, Any]] = []
    for node, metric in zip(layout.nodes, metrics, strict=True):
        if node.same_as >= 0:
            merged.append(merged[node.same_as])
            continue
        states: dict[str, Any] = {}
        for state in node.states:
            if state.kind not in IN_SUMS + IN_MAXIMA:
                states[state.name] = _joint(state.name, state.kind, list(enumerate(next(columns))), metric)
                continue
            total = next(totals)
            if state.kind in IN_MAXIMA:  # a minimum is a maximum of negated numbers
                found = next(largest)
                total = (found if state.kind == "max" else -found).masked_fill(total > 0, math.nan)
            total = total / reduced.holders if state.kind == "mean" else total
            states[state.name] = total.reshape(state.shape).to(dtype_of(state.dtype), copy=True)
        merged.append(_corrected(metric, states))
    return Merged(merged, updates, [{} for _ in updates])


def states_in_full(nodes: Sequence[Node], received: Iterable[Any], metrics: Sequence[Metric]) -> Merged:
    """Merge states that ranks with data have sent in full, in their order. Raises ConfigurationError on a misfit."""
    merged = Merged([], [0] * len(nodes), [{} for _ in nodes])
    parts: list[dict[str, tuple[str, list[tuple[int, Any]]]]] = [{} for _ in nodes]
    for rank, sent in received:
        states_of: dict[int, Any] = {}
        for position, path, name, updates, attributes, states in sent:
            if [path, name] != [*nodes[position][:2]]:
                raise _misfit(nodes[0].metric)
            states_of[position] = states_of[states] if isinstance(states, int) else states
            merged.updates[position] += updates
            merged.attributes[position] = merged.attributes[position] or dict(attributes)
            for state, kind, value in states_of[position]:
                parts[position].setdefault(state, (kind, []))[1].append((rank, value))
    for metric, of_node in zip(metrics, parts, strict=True):
        joint = {state: _joint(state, kind, values, metric) for state, (kind, values) in of_node.items()}
        merged.states.append(_corrected(metric, joint))
    return merged


def _misfit(metric: str) -> ConfigurationError:
    return ConfigurationError(f"The gathered states of {metric} do not fit. Run the same code on all ranks.")


def _corrected(metric: Metric, states: dict[str, Any]) -> dict[str, Any]:
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


def _joint(name: str, kind: str, parts: Sequence[tuple[int, Any]], metric: Metric) -> Any:
    """Merge a state of the ranks that have data, as torchmetrics' synchronisation does. Parts begin with the rank."""
    import torch

    if kind in ("cat", "list"):
        merged: list[Any] = []
        for rank, value in parts:
            if not isinstance(value, list) or (kind == "cat" and not _is_joined(value)):
                raise ConfigurationError(
                    f"State {name!r} of {type(metric).__name__} is not a list of tensors on rank {rank}. Give the "
                    "metric the same arguments on all ranks."
                )
            merged += separated(value) if kind == "cat" else value
        reduction = reduction_of(metric, name) if kind == "list" else None
        return reduction(merged) if merged and reduction is not None else merged
    (_, first), wanted = parts[0], getattr(parts[0][1], "shape", None)
    for rank, value in parts:
        shape = getattr(value, "shape", None)
        if shape is None or shape != wanted:
            here = "not a tensor" if shape is None else f"a tensor of shape {tuple(shape)}"
            there = "a tensor" if wanted is None else f"one of shape {tuple(wanted)}"
            raise ConfigurationError(
                f"State {name!r} of {type(metric).__name__} is {here} on rank {rank}, but {there} on another, so they "
                "cannot be merged. Give the metric the same arguments, and data of the same shape, on all ranks."
            )
    if kind == "stack":  # the state of a single rank is unchanged
        reduction = reduction_of(metric, name)
        if reduction is None and len(parts) == 1:
            return first
        joint = torch.stack([value for _, value in parts])
        return joint if reduction is None else reduction(joint)
    joint = torch.stack([value.to(torch.float64) for _, value in parts])
    reduced: Mapping[str, Any] = {"sum": joint.sum, "mean": joint.mean, "max": joint.amax, "min": joint.amin}
    return reduced[kind](0).to(first.dtype)


def _is_joined(item: Sequence[Any]) -> bool:
    """Return whether a list is a result of `metric_states.joined`."""
    import torch

    if not item:
        return True
    if not all(isinstance(part, torch.Tensor) for part in item) or [part.ndim > 0 for part in item] != [True, True]:
        return False
    return item[1].dtype is torch.int64 and int(item[1].abs().sum()) == len(item[0])
