"""The states and attributes of torchmetrics' metrics: read, copied, merged and restored.

All uses of private names of torchmetrics are in this module. There is no public access to the default and reduction of
a state, to the states of a metric while it is synced, or to its synchronisation method, and no public way to make a
copy compute as if it had been updated. tests/unit/payloads/test_metrics.py fails if upstream changes these names.
"""
# ruff: noqa: SLF001

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import as_tensor, on_host
from dist_wandb.payloads.framing import memory

if TYPE_CHECKING:
    from torch import Tensor
    from torchmetrics import Metric

IN_SUMS, IN_MAXIMA = ("sum", "mean"), ("max", "min")  # the other kinds are gathered: "cat", "stack", "list"
_EXTREMES = {"min_val": ("min", math.inf), "max_val": ("max", -math.inf)}  # attributes of MinMaxMetric, not states
_NO_LENGTH = -1  # length of a tensor without dimensions, which is a single number in a list
_WINDOW_COUNT = "_num_vals_seen"  # `Running` resets the metric that it wraps, and counts updates itself


class State(NamedTuple):
    """One state of a metric."""

    name: str  # in the metric
    # how states of many ranks are merged: `"sum"`, `"mean"`, `"max"`, `"min"`; `"cat"` for lists whose tensors
    # are concatenated, `"list"` for other lists, `"stack"` for tensors that are gathered
    kind: str
    shape: tuple[int, ...] = ()  # empty for lists
    dtype: str = ""  # such as `"float32"`; empty for lists

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def current(value: Any) -> Any:
    """Return the current metric of a `MetricTracker`, or other metrics; raise ConfigurationError if it has none yet."""
    from torchmetrics import MetricTracker

    if not isinstance(value, MetricTracker):
        return value
    if not value.n_steps:
        raise ConfigurationError(
            "A MetricTracker was logged before its increment() was called, so it has no metric yet. Call "
            "tracker.increment() at the start of each epoch, on all ranks."
        )
    return value[-1]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Metric]]:
    """Yield the metrics in a module. `modules()` would hash each of them, which takes long with many states."""
    from torchmetrics import Metric

    if isinstance(value, Metric):
        yield path, value
    for name, child in value._modules.items():
        if child is not None:
            yield from walk(child, f"{path}.{name}" if path else name)


@lru_cache(maxsize=256)
def obstacle(metric: type[Metric]) -> str | None:
    """Return why the states of such metrics cannot be merged; `None` if they can."""
    if metric._sync_dist.__module__.startswith("torchmetrics."):
        return None
    return (
        f"{metric.__name__} is not merged over ranks but averaged: each rank computes its own value, because the class "
        "has its own synchronisation method."
    )


@lru_cache(maxsize=256)
def is_a(metric: type[Metric], name: str) -> bool:
    """Return whether a class is torchmetrics' class of a name, or derived from it."""
    return any(base.__name__ == name and base.__module__.startswith("torchmetrics.") for base in metric.__mro__)


def states_of(metric: Metric) -> list[tuple[State, Any]]:
    """Return the states of this rank alone, also while the metric is synced."""
    cached = metric._cache if metric._is_synced else None
    held = metric.metric_state if cached is None else cached
    states = [(_state(metric, name, value), value) for name, value in held.items()]
    return states + [(State(name, _EXTREMES[name][0], (), "float64"), value) for name, value in _extremes(metric)]


def _extremes(metric: Metric) -> list[tuple[str, Tensor]]:
    if not is_a(type(metric), "MinMaxMetric"):
        return []
    return [(name, vars(metric)[name]) for name in _EXTREMES if name in vars(metric)]


def _state(metric: Metric, name: str, value: Any) -> State:
    from torchmetrics import utilities

    reduction = metric._reductions[name]
    if isinstance(metric._defaults[name], list):
        return State(name, "cat" if reduction is utilities.dim_zero_cat else "list")
    kind = next((kind for kind in IN_SUMS + IN_MAXIMA if reduction is getattr(utilities, f"dim_zero_{kind}")), "stack")
    shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
    is_exact = value.is_floating_point() or (dtype[:3] in {"int", "uin"} and not (kind in IN_MAXIMA and "64" in dtype))
    return State(name, kind if is_exact else "stack", shape, dtype)


def reduction_of(metric: Metric, name: str) -> Any:
    """Return what reduces a state's stacked tensors, if anything; raise ConfigurationError for an unknown state."""
    if name not in metric._reductions:
        raise ConfigurationError(
            f"{type(metric).__name__} has no state {name!r} on the rank that computes it. Create it with the same "
            "arguments on all ranks."
        )
    return metric._reductions[name]


def is_stacked(metric: Metric, name: str, value: Any) -> bool:
    """Return whether a state holds those of several ranks, one row for each."""
    default = metric._defaults.get(name)
    return getattr(value, "ndim", -1) == getattr(default, "ndim", 0) + 1


def is_default(metric: Metric, state: State, value: Any) -> bool:
    """Return whether a state on the host equals that of a metric that was never updated."""
    import torch

    if state.kind in {"cat", "list"}:
        return not value
    default = metric._defaults.get(state.name)
    if default is None and state.name in _EXTREMES:
        default = torch.tensor(_EXTREMES[state.name][1])
    if not isinstance(default, torch.Tensor) or default.shape != value.shape:
        return False
    default = default.to(value.device, value.dtype)
    return bool(((value == default) | (value.isnan() & default.isnan())).all())


@lru_cache(maxsize=1)
def _bookkeeping() -> tuple[frozenset[str], tuple[type, ...]]:
    """Return names of attributes that every metric has, which are not sent, and the types of attributes that are."""
    import torch
    from torchmetrics import Metric

    class Bare(Metric):
        def update(self) -> None: ...

        def compute(self) -> None: ...

    plain = (bool, int, float, str, type(None), torch.dtype, torch.Tensor)
    return frozenset((*vars(Bare()), *_EXTREMES)), plain


def attributes_of(metric: Metric) -> dict[str, Any]:
    """Return the plain attributes of a metric other than its states. Some classes set them at their first batch."""
    known, plain = _bookkeeping()
    states = metric._defaults
    return {
        name: value
        for name, value in vars(metric).items()
        if name not in known and name not in states and isinstance(value, plain)
    }


def _restore(metric: Metric, states: Mapping[str, Any], updates: int) -> None:
    for name, default in metric._defaults.items():
        if name not in states:
            setattr(metric, name, list(default) if isinstance(default, list) else default)
    remembered = dict(_extremes(metric))
    for name, value in states.items():
        if name in remembered:  # the extreme of all values computed so far
            known = remembered[name].to(value)
            setattr(metric, name, known.minimum(value) if _EXTREMES[name][0] == "min" else known.maximum(value))
        else:
            setattr(metric, name, list(value) if isinstance(value, list) else value)
    metric._update_count = updates
    if _WINDOW_COUNT in vars(metric):
        vars(metric)[_WINDOW_COUNT] = updates
    metric._computed = None


def updates_of(metric: Metric) -> int:
    return metric.update_count or int(vars(metric).get(_WINDOW_COUNT, 0))


def kept(kind: str, held: Any) -> Any:
    """Return a copy of a state. A tensor is cloned, as it may be updated in place; those in lists are not."""
    if isinstance(held, list):
        return list(held)
    copied = held.detach().clone()
    return [copied] if kind in {"cat", "list"} else copied


def joined(items: Sequence[Tensor]) -> list[Tensor]:
    """Join the tensors of a `"cat"` state: the joined tensor and the lengths; `[]` if there are none."""
    import torch
    from torchmetrics.utilities import dim_zero_cat

    if not items:
        return []
    lengths = [item.shape[0] if item.ndim else _NO_LENGTH for item in items]
    size, kinds = sum(item.nbytes for item in items), {(item.dtype, item.device.type) for item in items}
    if not size or len(kinds) > 1 or not items[0].is_cpu:
        whole = dim_zero_cat(list(items))
    else:  # the same, in `memory`
        rows = [item.detach() if item.ndim else item.detach().unsqueeze(0) for item in items]
        whole = torch.frombuffer(memory(size), dtype=items[0].dtype)
        whole = torch.cat(rows, out=whole.reshape(-1, *rows[0].shape[1:]))
    return [whole, torch.tensor(lengths, dtype=torch.int64, device="cpu")]


def separated(pair: Sequence[Tensor]) -> list[Tensor]:
    """Separate the tensors that `joined` has joined."""
    if not pair:
        return []
    whole, lengths = pair
    parts, start = [], 0
    for length in lengths.tolist():
        parts.append(whole[start] if length == _NO_LENGTH else whole[start : start + length])
        start += abs(length)
    return parts


class Shell:
    """A private copy of a user's metric or collection, which can compute from any states, and never synchronises."""

    def __init__(self, value: Any) -> None:
        from torchmetrics import MetricCollection

        shared = ("_cache", "_computed", "_forward_cache", "process_group", "dist_sync_fn", "distributed_available_fn")
        not_copied = (
            held
            for _, metric in walk(value)
            for held in (*metric.metric_state.values(), *(vars(metric).get(name) for name in shared))
        )
        try:
            self.value: Any = copy.deepcopy(value, {id(held): held for held in not_copied})
        except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
            raise ConfigurationError(
                f"{type(value).__name__} cannot be copied, so it cannot be merged over ranks: {error}. Log its "
                "compute()."
            ) from error
        self.metrics: list[Any] = [metric for _, metric in walk(self.value)]
        for metric in self.metrics:
            metric._cache = metric._computed = metric._forward_cache = metric.process_group = metric.dist_sync_fn = None
            metric._is_synced = metric._to_sync = False
            metric.distributed_available_fn = lambda: False
            _restore(metric, {}, 0)
            for name, extreme in _extremes(metric):
                setattr(metric, name, extreme.new_tensor(_EXTREMES[name][1]))
        for module in self.value.modules():
            if isinstance(module, MetricCollection):
                module.compute_groups.clear()  # otherwise it would make the states of a group equal before it computes
        self._on_host = False

    def compute(
        self,
        states: Sequence[Mapping[str, Any]],
        updates: Sequence[int],
        attributes: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Compute from states, update counts and attributes of all nodes; return values as `Snapshot.compute` does."""
        import torch

        with torch.no_grad():
            if not self._on_host:
                self.value._apply(on_host)
                self._on_host = True
            for metric, its_states, its_updates, its_attributes in zip(
                self.metrics, states, updates, attributes, strict=True
            ):
                for name, value in its_attributes.items():  # those that it had when it was logged
                    vars(metric)[name] = on_host(value).clone() if isinstance(value, torch.Tensor) else value
                _restore(metric, its_states, its_updates)
            try:
                return _named(self.value.compute())
            finally:
                for metric in self.metrics:  # it is kept longer than the states
                    _restore(metric, {}, 0)


def _named(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"/{key}{rest}": part for key, inner in value.items() for rest, part in _named(inner).items()}
    return {"": _plain(value)}


def _plain(value: Any) -> Any:
    if (tensor := as_tensor(value)) is not None:
        return tensor.tolist()  # a number if the tensor has no dimensions
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
