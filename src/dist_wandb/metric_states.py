"""What torchmetrics keeps in a metric: read, copied, merged and put back.

This is the room of torchmetrics' own names. There is no public way to a state's default and reduction, to the states of
a metric that is synced, to a metric's way to synchronise, or to make a copy compute as if it had been updated.
tests/unit/test_metrics.py fails when upstream changes them.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

IN_SUMS, IN_MAXIMA = ("sum", "mean"), ("max", "min")  # the other kinds, which are gathered: "cat", "stack", "list"
_MEMORY = {  # what these compute depends on more than on states
    "MinMaxMetric": "it remembers what it computed before",
    "Running": "it is a window over this rank's own updates",
}
_MISSING = object()


class State(NamedTuple):
    """One state of a metric.

    Args:
        name: Its name in the metric.
        kind: How the states of many ranks become one: `"sum"`, `"mean"`, `"max"`, `"min"`; `"cat"` for lists whose
            tensors are concatenated, `"list"` for other lists, `"stack"` for tensors that are gathered.
        shape: Its shape; of lists nothing.
        dtype: Its type of numbers, like `"float32"`; of lists nothing.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Metric]]:
    """The metrics in a module. `modules()` would hash each, which takes long with many states."""
    from torchmetrics import Metric

    if isinstance(value, Metric):
        yield path, value
    for name, child in value._modules.items():
        if child is not None:
            yield from walk(child, f"{path}.{name}" if path else name)


@lru_cache(maxsize=256)
def obstacle(metric: type[Metric]) -> str | None:
    """Why the states of such metrics cannot be merged."""
    bases = [base.__name__ for base in metric.__mro__ if base.__module__.startswith("torchmetrics.")]
    reason = next((_MEMORY[name] for name in bases if name in _MEMORY), None)
    if not metric._sync_dist.__module__.startswith("torchmetrics."):
        reason = "it synchronises in a way of its own"
    if reason is None:
        return None
    return f"{metric.__name__} is not merged over ranks but averaged: each rank computes by itself, as {reason}."


def states_of(metric: Metric) -> list[tuple[State, Any]]:
    """The states that are this rank's alone."""
    cached = metric._cache if metric._is_synced else None
    held = metric.metric_state if cached is None else cached
    return [(_state(metric, name, value), value) for name, value in held.items()]


def _state(metric: Metric, name: str, value: Any) -> State:
    from torchmetrics import utilities

    reduction = metric._reductions[name]
    if isinstance(metric._defaults[name], list):
        return State(name, "cat" if reduction is utilities.dim_zero_cat else "list")
    kind = next((kind for kind in IN_SUMS + IN_MAXIMA if reduction is getattr(utilities, f"dim_zero_{kind}")), "stack")
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    is_exact = value.is_floating_point() or (dtype[:3] in {"int", "uin"} and not (kind in IN_MAXIMA and "64" in dtype))
    return State(name, kind if is_exact else "stack", shape, dtype)


def _reduction(metric: Metric, name: str) -> Any:
    return metric._reductions[name]


def _private_copy(value: Any) -> Any:
    """A copy that never synchronises. It does not copy states, nor what belongs to the user's processes."""
    from torchmetrics import MetricCollection

    shared = ("_cache", "_computed", "_forward_cache", "process_group", "dist_sync_fn", "distributed_available_fn")
    memo = {}
    for _, metric in walk(value):
        for held in [*metric.metric_state.values(), *(vars(metric).get(name) for name in shared)]:
            memo[id(held)] = held
    try:
        copied = copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"{type(value).__name__} cannot be copied, so it cannot be merged over ranks: {error}. Log its compute()."
        ) from error
    for _, metric in walk(copied):
        metric._cache = metric._computed = metric._forward_cache = metric.process_group = metric.dist_sync_fn = None
        metric._is_synced = metric._to_sync = False
        metric.distributed_available_fn = _never
        for name, default in metric._defaults.items():
            setattr(metric, name, default)
    for module in copied.modules():
        if isinstance(module, MetricCollection):
            module.compute_groups.clear()  # else it would make states of a group equal before it computes
    return copied


def _never() -> bool:
    return False


def _restore(metric: Metric, states: Mapping[str, Any], updates: int) -> None:
    for name, value in states.items():
        setattr(metric, name, list(value) if isinstance(value, list) else value)
    metric._update_count = updates
    metric._computed = None


def updates_of(metric: Metric) -> int:
    """How often a metric was updated. `Running` resets what it wraps and counts by itself."""
    return metric.update_count or int(vars(metric).get("_num_vals_seen", 0))


def kept(kind: str, held: Any) -> Any:
    """A copy that does not change with the user's object: tensors may be updated in place, those in lists are not."""
    if isinstance(held, list):
        return list(held)
    copied = held.detach().clone()
    return [copied] if kind in {"cat", "list"} else copied


def joined(items: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a state of kind `"cat"` as one, if there are any."""
    from torchmetrics.utilities import dim_zero_cat

    return [dim_zero_cat(list(items))] if items else []


def merged(state: State, column: Sequence[Any], metric: Metric) -> Any:
    """A gathered state as torchmetrics leaves it after a synchronisation."""
    import torch
    from torchmetrics.utilities import dim_zero_cat

    if state.kind == "stack":
        if not all(isinstance(item, torch.Tensor) and item.shape == state.shape for item in column):
            raise ConfigurationError(f"State {state.name!r} of {type(metric).__name__} has another shape on a rank.")
        reduction = _reduction(metric, state.name)
        if reduction is None and len(column) == 1:
            return column[0]
        stacked = torch.stack(list(column))
        return stacked if reduction is None else reduction(stacked)
    if not all(isinstance(item, list) for item in column):
        raise ConfigurationError(f"State {state.name!r} of {type(metric).__name__} is no list on a rank.")
    if state.kind == "cat":
        items = [item for part in column for item in part]
        if not all(isinstance(item, torch.Tensor) for item in items):
            raise ConfigurationError(f"State {state.name!r} of {type(metric).__name__} has no tensors on a rank.")
        return dim_zero_cat(items) if items else torch.tensor([], dtype=metric.dtype, device="cpu")
    turns = zip_longest(*column, fillvalue=_MISSING)  # the ranks' first items come first, as torchmetrics does it
    items = [item for turn in turns for item in turn if item is not _MISSING]
    reduction = _reduction(metric, state.name)
    return reduction(items) if items and reduction is not None else items


class Shell:
    """A private copy of a user's metric or collection, to compute from any states.

    Args:
        value: The user's object.
    """

    def __init__(self, value: Any) -> None:
        self.value = _private_copy(value)
        self.metrics = [metric for _, metric in walk(self.value)]
        self._on_host = False

    def compute(self, states: Sequence[Mapping[str, Any]], updates: Sequence[int]) -> dict[str, Any]:
        """What the metric computes from the states of each of its nodes, by suffixes of names."""
        import torch

        with torch.no_grad():
            if not self._on_host:
                self.value.to("cpu")
                self._on_host = True
            for metric, its_states, count in zip(self.metrics, states, updates, strict=True):
                _restore(metric, its_states, count)
            return _named(self.value.compute())


def _named(value: Any) -> dict[str, Any]:
    """What was computed, by suffixes of names."""
    if isinstance(value, Mapping):
        return {f"/{key}{rest}": part for key, inner in value.items() for rest, part in _named(inner).items()}
    return {"": _plain(value)}


def _plain(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.tolist()  # of a tensor without dimensions: a number
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
