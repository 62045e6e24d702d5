"""Copies of logged tensors, which are transferred from a device to the host asynchronously."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.streams import event_after, has_passed, is_captured, keep_if_failed, kept_if_it_fails, wait_for
from dist_wandb.payloads.torchmetrics.metrics import is_metric

if TYPE_CHECKING:
    import torch

PLAIN = frozenset({float, int, bool, str})  # types whose objects cannot change


class HostCopy:
    """An asynchronous copy of a tensor to the host, or of several with one element each, of one device and dtype."""

    _event: Any = None
    _has_arrived = False

    def __init__(self, tensors: torch.Tensor | list[torch.Tensor]) -> None:
        import torch

        if isinstance(tensors, torch.Tensor):
            tensor = copy_for_numpy(tensors)
        else:
            tensor = torch.stack([one.detach().reshape(()) for one in tensors])
        self._copy = tensor.to("cpu", non_blocking=True)
        with kept_if_it_fails(self._copy):
            self._event = event_after(tensor.device)
        self._source = tensor if self._event is None else None
        self._numbers: list[float] | None = None

    def __del__(self) -> None:
        if not self._has_arrived and self._event is not None:
            keep_if_failed(self._event, self._copy)

    def is_ready(self) -> bool:
        """Return whether the copy can be read without waiting; always true if its device has no events."""
        return self._has_arrived or self._event is None or has_passed(self._event)

    def has_arrived(self) -> bool:
        """Return whether the copy has arrived for certain; without events, only once `tensor` was called."""
        return self._has_arrived or (self._event is not None and has_passed(self._event))

    def tensor(self) -> torch.Tensor:
        """Return the copy on the host. Waits for the device, so do not call it on the training thread."""
        if not self._has_arrived:
            if self._event is not None:
                wait_for(self._event)
                self._copy = self._copy.clone()  # the memory of the transfer is free again
            if self._source is not None:
                self._copy, self._source = self._source.cpu(), None
            self._has_arrived = True
        return self._copy

    def numbers(self) -> list[float]:
        """Return the numbers, in the order of the tensors. Waits for the device, like `tensor`."""
        if self._numbers is None:
            self._numbers = self.tensor().tolist()
        return self._numbers


class Later:
    """The number at an index of a copy, known once the copy has arrived."""

    __slots__ = ("_copy", "_index")

    def __init__(self, copy: HostCopy, index: int) -> None:
        self._copy = copy
        self._index = index

    def is_ready(self) -> bool:
        """See `HostCopy.is_ready`."""
        return self._copy.is_ready()

    def has_arrived(self) -> bool:
        """See `HostCopy.has_arrived`."""
        return self._copy.has_arrived()

    def number(self) -> float:
        """Return the number. Waits for the device, like `HostCopy.tensor`."""
        return self._copy.numbers()[self._index]


class LaterValue:
    """A `HostCopy`, or containers with `HostCopy`s in place of tensors, known once all copies have arrived."""

    __slots__ = ("_copies", "_value")

    def __init__(self, value: Any, copies: Sequence[HostCopy]) -> None:
        self._value = value
        self._copies = copies

    def is_ready(self) -> bool:
        """See `HostCopy.is_ready`."""
        return all(copy.is_ready() for copy in self._copies)

    def has_arrived(self) -> bool:
        """See `HostCopy.has_arrived`."""
        return all(copy.has_arrived() for copy in self._copies)

    def value(self) -> Any:
        """Return the value. Waits for the devices, like `HostCopy.tensor`."""
        return _arrived(self._value)


def _arrived(value: Any) -> Any:
    if isinstance(value, HostCopy):
        return value.tensor()
    if type(value) is dict:
        return {name: _arrived(item) for name, item in value.items()}
    return type(value)(map(_arrived, value)) if type(value) in (list, tuple) else value


def known(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `Later` and `LaterValue` objects in a row of `scalars.copied_row` by their values. Waits for devices."""
    if not any(isinstance(value, (Later, LaterValue, dict)) for value in values.values()):
        return values
    return {name: _known(value) for name, value in values.items()}


def _known(value: Any) -> Any:
    if type(value) is Later:
        return value.number()
    if type(value) is dict:
        return known(value)
    return value.value() if isinstance(value, LaterValue) else value


def copy_for_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, without its graph, in a dtype that numpy and wandb support."""
    import torch

    is_unknown = tensor.dtype.is_floating_point and tensor.dtype not in (torch.float16, torch.float32, torch.float64)
    return tensor.detach().float() if is_unknown else tensor.detach().clone()


def as_tensor(value: object) -> torch.Tensor | None:
    """Return a value if it is a tensor, otherwise `None`. Does not import torch."""
    torch = sys.modules.get("torch")
    return value if torch is not None and isinstance(value, torch.Tensor) else None


def whole(what: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor; for a replicated `DTensor`, this rank's local one. `what` is its name, for messages.

    Raises ConfigurationError if this rank has only a part of it, because gathering the parts waits for other ranks, and
    while a CUDA graph is captured, which would copy it at each replay, to memory that is used for something else then.
    """
    if is_captured(tensor):
        raise ConfigurationError(
            f"{what} was logged on rank {rank} while a CUDA graph is captured: it has no value yet, and replays of the "
            "graph do not call log. Log it after replay(), outside of the captured code."
        )
    placements = getattr(tensor, "placements", None)  # a plain tensor has none
    if placements is None:
        return tensor
    if all(placement.is_replicate() for placement in placements):
        local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]  # a DTensor has it
        return local
    raise ConfigurationError(
        f"{what} is a DTensor of which rank {rank} has only a part (its placements are {tuple(placements)}), and log "
        "does not wait for the other ranks. Call its .full_tensor() on every rank, outside of 'if rank == 0', and pass "
        "the result."
    )


def whole_tensors(metrics: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Replace replicated `DTensor`s in a row, and in its mappings, by plain tensors; see `whole`."""
    others = {name: value for name, value in metrics.items() if type(value) not in PLAIN}
    found: dict[str, Any] = {}
    for name, value in others.items():
        if isinstance(value, Mapping) and not is_metric(value):
            found[name] = whole_tensors(value, rank)
        elif (tensor := as_tensor(value)) is not None:
            found[name] = whole(repr(name), tensor, rank)
    is_same = all(value is others[name] for name, value in found.items())
    return metrics if is_same else {**metrics, **found}


def copied_tensor(value: Any) -> Any:
    """Return a copy of a tensor, without its graph, or any other value unchanged."""
    tensor = as_tensor(value)
    return value if tensor is None else tensor.detach().clone()
