"""What a user logs, taken on the training thread: copied where it could change, never waited for."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.torchmetrics.metrics import is_metric, take_snapshot
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

if TYPE_CHECKING:
    import torch

Weight: TypeAlias = "float | torch.Tensor | Mapping[str, float | torch.Tensor] | None"

_AS_THEY_ARE = frozenset({float, int, bool, str})
_DEEPEST = 8  # levels of lists in lists that are copied: some hold themselves


class HostCopy:
    """A tensor of a device, on its way to the host: nobody has waited for it yet.

    Args:
        tensors: A tensor of any shape; or several of one element each, of one device and dtype, that go together.
    """

    def __init__(self, tensors: torch.Tensor | list[torch.Tensor]) -> None:
        import torch

        if isinstance(tensors, torch.Tensor):
            tensor = _copy_for_numpy(tensors)
        else:
            tensor = torch.stack([one.detach().reshape(()) for one in tensors])
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = event_after(tensor)
        self._source = tensor if self._event is None else None
        self._numbers: list[float] | None = None
        self._has_arrived = False

    def is_ready(self) -> bool:
        """Whether the copy can be had without waiting, as far as the device tells."""
        return self._has_arrived or self._event is None or bool(self._event.query())

    def has_arrived(self) -> bool:
        """Whether the copy is sure to be had without waiting: not where a device tells nothing."""
        return self._has_arrived or (self._event is not None and bool(self._event.query()))

    def tensor(self) -> torch.Tensor:
        """The copy on the host. Waits for the device: not to be called on the training thread."""
        if not self._has_arrived:
            if self._event is not None:
                self._event.synchronize()
            if self._source is not None:
                self._copy, self._source = self._source.cpu(), None
            self._has_arrived = True
        return self._copy

    def numbers(self) -> list[float]:
        """The numbers, in the order of the tensors. Waits for the device, as `tensor` does."""
        if self._numbers is None:
            self._numbers = self.tensor().tolist()
        return self._numbers


class Later:
    """A number that is known once its copy has come to the host.

    Args:
        copy: The copy that it is part of.
        index: Its place there.
    """

    __slots__ = ("_copy", "_index")

    def __init__(self, copy: HostCopy, index: int) -> None:
        self._copy = copy
        self._index = index

    def is_ready(self) -> bool:
        """Whether the number can be had without waiting, as far as the device tells."""
        return self._copy.is_ready()

    def has_arrived(self) -> bool:
        """Whether the number is sure to be had without waiting."""
        return self._copy.has_arrived()

    def number(self) -> float:
        """The number. Waits for the device: not to be called on the training thread."""
        return self._copy.numbers()[self._index]


class LaterValue:
    """What is not a number, and is known once copies of tensors have come to the host: a vector, or a list with some.

    Args:
        value: A `HostCopy`, or lists, tuples and mappings with some of them in place of tensors.
        copies: All of them.
    """

    __slots__ = ("_copies", "_value")

    def __init__(self, value: Any, copies: Sequence[HostCopy]) -> None:
        self._value = value
        self._copies = copies

    def is_ready(self) -> bool:
        """Whether the value can be had without waiting, as far as the devices tell."""
        return all(copy.is_ready() for copy in self._copies)

    def has_arrived(self) -> bool:
        """Whether the value is sure to be had without waiting."""
        return all(copy.has_arrived() for copy in self._copies)

    def value(self) -> Any:
        """The value. Waits for the devices: not to be called on the training thread."""
        return _arrived(self._value)


def _arrived(value: Any) -> Any:
    if isinstance(value, HostCopy):
        return value.tensor()
    if type(value) is dict:
        return {name: _arrived(item) for name, item in value.items()}
    return type(value)(map(_arrived, value)) if type(value) in (list, tuple) else value


def known(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was taken, with the numbers and vectors that came from devices. Waits for them.

    Args:
        values: What `take` returned.
    """
    if not any(type(value) in (Later, LaterValue) for value in values.values()):
        return values
    return {name: _known(value) for name, value in values.items()}


def _known(value: Any) -> Any:
    if type(value) is Later:
        return value.number()
    return value.value() if type(value) is LaterValue else value


def take(metrics: Mapping[str, Any], rank: int, *, flat: bool = True) -> dict[str, Any]:
    """What is to be logged, safe from later changes: numbers as Python's, or on their way to the host.

    Args:
        metrics: Values by name.
        rank: This rank, for messages.
        flat: Whether mappings among them are flattened, with a dot between the names, as W&B shows them; otherwise
            only those that have torchmetrics' objects in them.

    Returns:
        Values by name: numbers of Python, `Later`, snapshots of torchmetrics' objects; what is not a number as it is,
        but for copies of lists, arrays and tensors, and `LaterValue` where these lie on a device.

    Raises:
        ConfigurationError: A tensor of which this rank has only a part.
    """
    for value in metrics.values():
        if type(value) not in _AS_THEY_ARE:
            return _take_others(metrics, rank, flat=flat)
    return dict(metrics)


def _take_others(metrics: Mapping[str, Any], rank: int, *, flat: bool) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    on_devices: dict[tuple[Any, Any], list[tuple[str, Any]]] = {}
    for name, value in _flat(metrics, all_of_it=flat):
        if not _can_be_stored(name):
            raise ConfigurationError(
                f"The name {name!r} on rank {rank} has NUL characters or lone surrogates, which W&B cannot store. Take "
                "them out. Nothing of this row was written."
            )
        if type(value) in _AS_THEY_ARE:
            taken[name] = value
            continue
        tensor = as_tensor(value)
        if tensor is None:
            taken[name] = _taken(name, value, rank)
            continue
        tensor = whole(repr(name), tensor, rank)
        if tensor.numel() != 1 or tensor.is_complex():
            taken[name] = _copied(name, tensor, rank)
        elif tensor.device.type == "cpu":
            taken[name] = tensor.item()
        else:
            taken[name] = None  # keeps its place in the row
            on_devices.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    for group in on_devices.values():
        copy = HostCopy([tensor for _, tensor in group])
        taken.update({name: Later(copy, index) for index, (name, _) in enumerate(group)})
    return taken


def take_weight(weight: object, rank: int) -> Any:
    """Check a weight and make it safe from later changes.

    Args:
        weight: A number, a mapping of names to numbers, or `None`.
        rank: This rank, for messages.

    Returns:
        `None`, a number, or a mapping of names to numbers; those of tensors on a device are still on their way.

    Raises:
        ConfigurationError: It is none of these, or a number is negative or not finite.
    """
    if weight is None:
        return None
    if isinstance(weight, Mapping):
        return {name: _take_one_weight(f"weight[{name!r}]", value, rank) for name, value in weight.items()}
    return _take_one_weight("weight", weight, rank)


def _take_one_weight(argument: str, value: object, rank: int) -> Any:
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


def checked_weight(argument: str, weight: float, rank: int) -> float:
    """Return a weight that can be one.

    Raises:
        ConfigurationError: It is negative or not finite.
    """
    if 0 <= weight < math.inf:
        return weight
    raise ConfigurationError(
        f"{argument}={weight!r} on rank {rank} is negative or not finite, so no mean can be weighted with it. Pass the "
        "number of samples or tokens behind the values; 0 where there were none."
    )


def is_number(value: object) -> bool:
    """Whether a value that was taken is a number, perhaps still on its way."""
    return isinstance(value, (int, float, Later))


def _flat(metrics: Mapping[str, Any], *, all_of_it: bool) -> Iterable[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping) and not is_metric(value) and (all_of_it or _has_metrics(value)):
            yield from ((f"{name}.{inner}", item) for inner, item in _flat(value, all_of_it=True))
        else:
            yield name, value


def _has_metrics(values: Mapping[str, Any]) -> bool:
    return any(is_metric(value) or (isinstance(value, Mapping) and _has_metrics(value)) for value in values.values())


def check_row(metrics: object, rank: int) -> None:
    """Refuse what is no row.

    Args:
        metrics: What `log` was given.
        rank: The rank that logs, for messages.

    Raises:
        ConfigurationError: It is no mapping, or a name is no text that W&B can store.
    """
    if not isinstance(metrics, Mapping):
        raise ConfigurationError(
            f"log was given {type(metrics).__name__} on rank {rank}, but it takes a mapping of names "
            'to values, as in log({"loss": 0.5}).'
        )
    for name in metrics:
        if not isinstance(name, str) or not _can_be_stored(name):
            raise ConfigurationError(
                f"log was given the name {name!r} ({type(name).__name__}) on rank {rank}, but names "
                "are text, without NUL characters and lone surrogates. Nothing of this row was written."
            )


def _can_be_stored(name: str) -> bool:
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            return False
    return "\0" not in name


def checked_step(step: object, rank: int) -> int:
    """The step as an integer that ranks can tell from others.

    Args:
        step: What `log` was given.
        rank: The rank that logs, for messages.

    Raises:
        ConfigurationError: It is no integer, or too large for that.
    """
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is no integer, but rows of the ranks are matched by it. Pass the number of "
            "optimizer steps so far."
        ) from None
    if number < 0:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is negative, but the x axis begins at 0. Pass the number of optimizer steps "
            "so far, or no step."
        )
    if number > LARGEST_EXACT_INTEGER:
        raise ConfigurationError(
            f"step={step!r} on rank {rank} is beyond 2**53, where ranks cannot tell steps apart. Pass the number of "
            "optimizer steps so far, or a time in seconds."
        )
    return number


def _taken(name: str, value: Any, rank: int) -> Any:
    if is_metric(value):
        return take_snapshot(value)
    number = _number_of_host(value)
    return _copied(name, _of_python(value), rank) if number is None else number


def _copied(name: str, value: Any, rank: int) -> Any:
    """What is not a number, as it is now: vectors, and lists and mappings with what is in them, are copied."""
    copies: list[HostCopy] = []
    copy = _copy_of(name, value, rank, copies, _DEEPEST)
    return LaterValue(copy, copies) if copies else copy


def _copy_of(name: str, value: Any, rank: int, copies: list[HostCopy], depth: int) -> Any:
    """A copy, with each tensor of a device replaced by an entry of `copies`."""
    if isinstance(value, (list, tuple)) and depth:
        items = iter(value)
        if not _AS_THEY_ARE.issuperset(map(type, value)):
            items = (_copy_of(name, item, rank, copies, depth - 1) for item in value)
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and depth:
        return {key: _copy_of(name, item, rank, copies, depth - 1) for key, item in value.items()}
    tensor = as_tensor(value)
    if tensor is None:
        return value.copy() if type(value).__name__ == "ndarray" else value
    tensor = whole(repr(name), tensor, rank)
    if tensor.device.type == "cpu":
        return _copy_for_numpy(tensor)
    copies.append(HostCopy(tensor))
    return copies[-1]


def _copy_for_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as they are now, without its graph, and of a dtype that numpy, so wandb, knows too."""
    import torch

    is_unknown = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return tensor.detach().float() if is_unknown else tensor.detach().clone()


def _of_python(value: Any) -> Any:
    """A numpy scalar, an array without axes, or an array of one number as Python's; anything else as it is."""
    shape = getattr(value, "shape", None)
    is_scalar = shape == () and hasattr(value, "item")
    is_one_number = type(value).__name__ == "ndarray" and value.size == 1 and value.dtype.kind in "biuf"
    return value.item() if is_scalar or is_one_number else value


def _number_of_host(value: Any) -> float | None:
    """A numpy scalar, an array of one number, a `Fraction`, an `IntEnum` and the like as Python's number."""
    value = _of_python(value)
    if isinstance(value, int):
        return value if type(value) is bool else int(value)
    return float(value) if isinstance(value, Real) else None


def as_tensor(value: object) -> torch.Tensor | None:
    """A value if it is a tensor."""
    torch = sys.modules.get("torch")  # nobody has a tensor without importing it
    return value if torch is not None and isinstance(value, torch.Tensor) else None


def whole(what: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A tensor as it lies on this rank, if all of it does: a `DTensor` may lie on several.

    Args:
        what: What was given the tensor, for messages.
        tensor: A tensor of any kind.
        rank: This rank, for messages.

    Returns:
        The tensor; of a `DTensor` that every rank has a copy of, this rank's.

    Raises:
        ConfigurationError: This rank has only a part, and to ask the others for theirs would be to wait for them.
    """
    placements = getattr(tensor, "placements", None)  # a plain tensor has none
    if placements is None:
        return tensor
    if all(placement.is_replicate() for placement in placements):
        local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]  # a DTensor has it
        return local
    raise ConfigurationError(
        f"{what} is a DTensor of which rank {rank} has only a part (its placements are {tuple(placements)}), and log "
        "does not wait for the other ranks. Call its .full_tensor() on every rank, outside of 'if rank == 0', and pass "
        "what it returns."
    )


def whole_tensors(metrics: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """What is to be logged, with plain tensors in place of those that lie on several ranks.

    Args:
        metrics: Values by name; mappings among them as well.
        rank: This rank, for messages.

    Raises:
        ConfigurationError: As `whole`.
    """
    others = {name: value for name, value in metrics.items() if type(value) not in _AS_THEY_ARE}
    found = {name: _whole_value(name, value, rank) for name, value in others.items()}
    is_same = all(value is others[name] for name, value in found.items())
    return metrics if is_same else {**metrics, **found}


def _whole_value(name: str, value: Any, rank: int) -> Any:
    if isinstance(value, Mapping) and not is_metric(value):
        return whole_tensors(value, rank)
    tensor = as_tensor(value)
    return value if tensor is None else whole(repr(name), tensor, rank)


def copied_tensor(value: Any) -> Any:
    """A tensor's numbers as they are now, without its graph; what is no tensor as it is."""
    tensor = as_tensor(value)
    return value if tensor is None else tensor.detach().clone()


def _shown(value: object) -> str:
    tensor = as_tensor(value)  # whose numbers are perhaps on a device, which is not to be waited for
    if tensor is not None:
        return f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__} of shape {tuple(shape)}" if shape else repr(value)


def event_after(tensor: torch.Tensor) -> Any:
    """An event of the tensor's device after all that was asked of it; `None` where the device has no events."""
    import torch

    module: Any = getattr(torch, tensor.device.type, None)
    if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
        return None
    event = module.Event()
    event.record(module.current_stream(tensor.device))
    return event
