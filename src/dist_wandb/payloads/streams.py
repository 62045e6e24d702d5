"""Events and copies of devices, beside a training that may capture CUDA graphs.

While one thread captures a CUDA graph in CUDA's usual mode, a query of an event on another thread raises, and makes the
capture fail. So events are queried in the relaxed mode of the calling thread, as NCCL's watchdog in torch does.
Nothing here is a call that `torch.cuda.set_sync_debug_mode` reports: its mode holds for all threads of the process.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


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


def keep_if_failed(event: Any, copies: object) -> None:
    """Keep asynchronous copies, of which `event` is the end, for ever if the device has failed.

    Otherwise torch would abort the process when they are freed, perhaps before the run has ended.
    """
    with _beside_captures(), suppress(RuntimeError), kept_if_it_fails(copies):
        event.query()


@contextmanager
def kept_if_it_fails(copies: object) -> Iterator[None]:
    """Keep asynchronous copies for ever, as `keep_if_failed` does, if a device has failed when it is used."""
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


def is_captured(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a device of which the current stream captures a graph."""
    return tensor.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing()


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
