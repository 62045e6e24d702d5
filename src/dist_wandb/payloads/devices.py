"""Copies of logged tensors, which are transferred to the host asynchronously, and events of devices.

While one thread captures a CUDA graph in CUDA's usual mode, a query of an event on another thread raises, and makes the
capture fail. So events are queried in the relaxed mode of the calling thread, as NCCL's watchdog in torch does.
Nothing here is a call that `torch.cuda.set_sync_debug_mode` reports: its mode holds for all threads of the process.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

PLAIN = frozenset({float, int, bool, str})  # types whose objects cannot change
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


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

    def __del__(self) -> None:
        if not self._has_arrived and self._event is not None:
            # If the device has failed, torch would abort the process when the copy is freed, perhaps before the run has
            # ended.
            with _beside_captures(), suppress(RuntimeError), kept_if_it_fails(self._copy):
                self._event.query()

    def is_ready(self) -> bool:
        """Return whether the copy can be read without waiting; always true if its device has no events."""
        return self._has_arrived or self._event is None or has_passed(self._event)

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

    @functools.cached_property
    def numbers(self) -> list[float]:
        """The numbers, in the order of the tensors. Waits for the device, like `tensor`."""
        return list(self.tensor().tolist())


class LaterValue:
    """A `HostCopy`, or containers with `HostCopy`s in place of tensors, known once all copies have arrived."""

    __slots__ = ("_copies", "_value")

    def __init__(self, value: Any, copies: Sequence[HostCopy]) -> None:
        self._value = value
        self._copies = copies

    def is_ready(self) -> bool:
        return all(copy.is_ready() for copy in self._copies)

    def value(self) -> Any:
        """Return the value. Waits for the devices, like `HostCopy.tensor`."""
        return arrived(self._value)


class Later(LaterValue):
    """The number at an index of a copy, known once the copy has arrived."""

    __slots__ = ()

    def __init__(self, copy: HostCopy, index: int) -> None:
        super().__init__(index, (copy,))

    def number(self) -> float:
        number: float = self._copies[0].numbers[self._value]
        return number

    value = number


def arrived(value: Any) -> Any:
    """Return a value with tensors in place of `HostCopy`s, at any depth. Waits for the devices."""
    if isinstance(value, HostCopy):
        return value.tensor()
    if type(value) is dict:
        return {name: arrived(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(arrived, value))
    return type(value)(*map(arrived, value)) if hasattr(value, "_fields") and isinstance(value, tuple) else value


def known(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace `LaterValue`s in a row of `scalars.copied_row` by their values. Waits for devices."""
    if not any(isinstance(value, (LaterValue, dict)) for value in values.values()):
        return values
    return {
        name: known(value) if type(value) is dict else value.value() if isinstance(value, LaterValue) else value
        for name, value in values.items()
    }


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
    if tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
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


# --- events -----------------------------------------------------------------------------------------------------------


def event_after(device: torch.device) -> Any:
    """Record and return an event after the work submitted to a device's stream; `None` if it has no events."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if not (hasattr(module, "Event") and hasattr(module, "current_stream")):
        return None
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def has_passed(event: Any) -> bool:
    """Return whether a device has passed an event, or has failed: then what waits for the event raises."""
    with _beside_captures():
        try:
            return bool(event.query())
        except RuntimeError:
            return True


def wait_for(event: Any) -> None:
    """Wait for an event, so do not call it on the training thread. Raises RuntimeError if the device has failed."""
    with _beside_captures():
        if not event.query():
            event.synchronize()


@contextmanager
def kept_if_it_fails(copies: object) -> Iterator[None]:
    """Keep asynchronous copies for ever, if a device has failed when it is used."""
    try:
        yield
    except RuntimeError:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(copies))
        raise


def elapsed(began: Any, ended: Any) -> float:
    """Return the milliseconds between two events; 0 if they are of different devices, or a device has failed."""
    with _beside_captures():
        try:
            return float(began.elapsed_time(ended))
        except (RuntimeError, ValueError):
            return 0.0


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's copy on the host, or a tensor on the host itself. Waits for the device, like `wait_for`."""
    import torch

    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    with _beside_captures():
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor, non_blocking=True)
        event = event_after(tensor.device)
        if event is None:
            return tensor.cpu()
        event.synchronize()
        return copy


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Keep the captures of other threads valid, whatever the calls inside are."""
    torch = sys.modules.get("torch")
    exchange = _exchange_mode() if torch is not None and torch.cuda.is_initialized() else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # swaps `mode` and the mode of this thread
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.lru_cache(maxsize=1)
def _exchange_mode() -> Any:
    """Return the driver's function, because torch does not offer it; `None` if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
