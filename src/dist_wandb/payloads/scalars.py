"""The arguments of `log`: checks of names, steps and weights, and copies of values that could change.

Copies are made on the training thread without waiting for a device. Numbers on the host become Python numbers. Scalar
tensors on a device are stacked, one stack per device and dtype, and copied asynchronously, followed by an event;
vectors, also in lists, are copied one by one. States of torchmetrics' objects are copied, and so are tables and images
to be gathered. For a replicated `DTensor`, this rank's local tensor is used. A part of one is refused, because
`full_tensor` would be a collective (`devices.whole`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import PLAIN, HostCopy, Later, LaterValue, as_tensor, copy_for_numpy, whole
from dist_wandb.payloads.metrics import is_metric, take_snapshot
from dist_wandb.settings.config_values import is_scalar
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

if TYPE_CHECKING:
    import torch

Weight: TypeAlias = "float | torch.Tensor | Mapping[str, float | torch.Tensor] | None"
Paths: TypeAlias = "dict[str, tuple[str, ...]]"  # of the names of `flattened` rows that were nested

DEEPEST = 8  # maximum depth of nested containers that are copied, because a list may contain itself


def checked_weight(argument: str, weight: float, rank: int) -> float:
    """Return a weight; raise ConfigurationError if it is negative or not finite."""
    if 0 <= weight < math.inf:
        return weight
    raise ConfigurationError(
        f"{argument}={weight!r} on rank {rank} is negative or not finite, so no mean can be weighted with it. Pass the "
        "number of samples or tokens behind the values; 0 if there were none."
    )


class WrongTypeError(ConfigurationError, TypeError):
    """An argument that is a `TypeError` in wandb, too: not a row, not a step, or unknown."""


def check_row(metrics: object, rank: int) -> None:
    """Raise WrongTypeError for a row that is no mapping of names to values, or has a name that W&B cannot store."""
    if not isinstance(metrics, (dict, Mapping)):  # the check for a dict is faster
        raise WrongTypeError(
            f"log was given {type(metrics).__name__} on rank {rank}, but it takes a mapping of names "
            'to values, as in log({"loss": 0.5}).'
        )
    try:
        names = "".join(metrics)  # all names at once, because this is a hot path
    except TypeError:  # some name is not text
        names = "\0"
    if "\0" in names or not names.isascii():
        for name in metrics:
            check_name(name, rank)


def check_name(name: object, rank: int) -> None:
    """Raise WrongTypeError for a name that W&B cannot store, such as one with NUL characters or lone surrogates."""
    if isinstance(name, str) and "\0" not in name:
        if name.isascii():
            return
        with suppress(UnicodeEncodeError):
            name.encode()
            return
    raise WrongTypeError(
        f"log was given the name {name!r} ({type(name).__name__}) on rank {rank}, but names "
        "are text, without NUL characters and lone surrogates. Nothing of this row was written."
    )


def checked_step(step: object, rank: int) -> int:
    """Return the step as an integer; raise ConfigurationError if it is none, negative, or not exact in a float64."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # anything else raises
    except TypeError:
        raise WrongTypeError(
            f"step={step!r} on rank {rank} is not an integer, but rows of the ranks are matched by it. Pass the "
            "number of optimizer steps so far."
        ) from None
    if number < 0:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is negative, but the x axis begins at 0. Pass the number of optimizer steps "
            "so far, or no step."
        )
    if number > LARGEST_EXACT_INTEGER:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is beyond 2**53, where ranks cannot distinguish steps. Pass the number of "
            "optimizer steps so far, or a time in seconds."
        )
    return number


def flattened(metrics: Mapping[Any, Any], paths: Paths, rank: int, within: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return a row without nested mappings, with a dot between the names as W&B shows them; add to `paths`.

    Raises WrongTypeError for a name within a mapping that W&B cannot store.
    """
    row: dict[str, Any] = {}
    for inner, value in metrics.items():
        if not within and (type(value) in PLAIN or as_tensor(value) is not None):  # a hot path
            row[inner] = value
            continue
        path = (*within, str(inner))
        if isinstance(value, Mapping) and not is_metric(value) and len(path) <= DEEPEST:
            row.update(flattened(value, paths, rank, path))
            continue
        name = ".".join(path)
        if within:
            check_name(name, rank)
            paths[name] = path
        row[name] = value
    return row


def nested(row: Mapping[str, Any], paths: Paths, within: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return a `flattened` row as it was, added to the values `within`."""
    found = dict(within)
    for name, value in row.items():
        *outer, last = paths.get(name, (name,))
        values = found
        for one in outer:
            before = values.get(one)
            values[one] = dict(before) if isinstance(before, dict) else {}
            values = values[one]
        values[last] = value
    return found


def copied_row(metrics: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Return a copy of a `flattened` row: with Python numbers, snapshots of metrics, copies of arrays; others as are.

    Values on a device become `Later` or `LaterValue`. Raises ConfigurationError for a part of a tensor.
    """
    row: dict[str, Any] = {}
    on_devices: dict[tuple[Any, Any], list[tuple[str, Any]]] = {}
    for name, value in metrics.items():
        if type(value) in PLAIN:
            row[name] = value
            continue
        tensor = as_tensor(value)
        if tensor is None:
            if is_metric(value):
                row[name] = take_snapshot(value)
            else:
                number = _number_of_host(value)
                row[name] = _copied(name, _of_python(value), rank) if number is None else number
            continue
        tensor = whole(repr(name), tensor, rank)
        if tensor.numel() != 1 or tensor.is_complex():
            row[name] = _copied(name, tensor, rank)
        elif tensor.device.type == "cpu":
            row[name] = tensor.item()
        else:
            row[name] = None  # keeps its position in the row
            on_devices.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    for group in on_devices.values():
        copy = HostCopy([tensor for _, tensor in group])
        row.update({name: Later(copy, index) for index, (name, _) in enumerate(group)})
    return row


def commit_and_weight(third: Sequence[Any], commit: Any, weight: Any) -> tuple[bool | None, Any]:
    """Return `commit` and `weight` of a call of `log`: in third place, a bool is `commit`, as in wandb."""
    if third and third[0] is not None:
        is_commit = type(third[0]).__name__ in ("bool", "bool_")  # of Python, numpy
        commit, weight = (third[0], weight) if is_commit else (commit, third[0])
    return (None if commit is None else bool(commit)), weight


def copied_weight(weight: object, rank: int) -> Any:
    """Check and copy a `Weight`: Python numbers, or `Later` on a device; raise if negative or not finite."""
    if weight is None:
        return None
    if isinstance(weight, Mapping):
        return {name: _copied_one_weight(f"weight[{name!r}]", value, rank) for name, value in weight.items()}
    return _copied_one_weight("weight", weight, rank)


def _copied_one_weight(argument: str, value: object, rank: int) -> Any:
    if type(value) is float or type(value) is int:
        return checked_weight(argument, value, rank)
    tensor = as_tensor(value)
    tensor = tensor if tensor is None else whole(argument, tensor, rank)
    if tensor is not None and tensor.numel() == 1 and not tensor.is_complex():
        if tensor.device.type != "cpu":
            return Later(HostCopy([tensor]), 0)
        return checked_weight(argument, tensor.item(), rank)
    number = _number_of_host(value) if tensor is None else None
    if number is None:
        raise ConfigurationError(
            f"{argument} was given {_shown(value)} on rank {rank}, but it takes one number, such as the batch size, or "
            "a mapping of names to numbers."
        )
    return checked_weight(argument, float(number), rank)


def is_number(value: object) -> bool:
    """Return whether a value of `copied_row` is a number, which may be a `Later`."""
    return isinstance(value, (int, float, Later))


def _copied(name: str, value: Any, rank: int) -> Any:
    """Copy a value that is not a number: vectors, and containers with their items."""
    copies: list[HostCopy] = []
    copy = _copy_of(name, value, rank, copies, DEEPEST)
    return LaterValue(copy, copies) if copies else copy


def _copy_of(name: str, value: Any, rank: int, copies: list[HostCopy], depth: int) -> Any:
    """Copy a value, with a `HostCopy` for each tensor on a device, also added to `copies`."""
    if isinstance(value, (list, tuple)) and depth:
        items = iter(value)
        if not PLAIN.issuperset(map(type, value)):
            items = (_copy_of(name, item, rank, copies, depth - 1) for item in value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and depth:
        return {key: _copy_of(name, item, rank, copies, depth - 1) for key, item in value.items()}
    tensor = as_tensor(value)
    if tensor is None:
        return value.copy() if type(value).__name__ == "ndarray" else value
    tensor = whole(repr(name), tensor, rank)
    if tensor.device.type == "cpu":
        return copy_for_numpy(tensor)
    copies.append(HostCopy(tensor))
    return copies[-1]


def _of_python(value: Any) -> Any:
    """Convert a numpy scalar, an array without axes, or an array of one number to a Python value."""
    has_no_axes = is_scalar(value)
    is_one_number = type(value).__name__ == "ndarray" and value.size == 1 and value.dtype.kind in "biuf"
    if has_no_axes and type(value).__name__.startswith("Masked") and value.mask:  # a mean of none: its `item` is 0
        return math.nan
    return value.item() if has_no_axes or is_one_number else value


def _number_of_host(value: Any) -> float | None:
    """Convert a numpy scalar, an array of one number, a `Fraction`, an `IntEnum` etc. to a Python number."""
    value = _of_python(value)
    if isinstance(value, int):
        return value if type(value) is bool else int(value)
    return float(value) if isinstance(value, Real) else None


def _shown(value: Any) -> str:
    tensor = as_tensor(value)  # its numbers are not shown: that would wait for a device
    if tensor is not None:
        return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    shape = value.shape if hasattr(type(value), "shape") else None
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape else repr(value)
