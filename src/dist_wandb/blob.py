"""Tensors, and plain values around them, as bytes: a JSON header and raw numbers. Reading executes nothing."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

_LENGTH = 8  # bytes that tell the length of the header


def encode(items: Sequence[Any]) -> bytes:
    """Write tensors, numbers, text, bytes, `None`, and lists and tuples of these.

    Args:
        items: What is to be written. Tensors must be on the CPU.

    Raises:
        ConfigurationError: Something of another type is among them.
    """
    raw: list[bytes] = []
    header = json.dumps([_describe(item, raw) for item in items], separators=(",", ":")).encode()
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *raw])


def decode(blob: bytes) -> list[Any]:
    """Read what `encode` wrote.

    Raises:
        ConfigurationError: The bytes are something else, or not all of them are there.
    """
    try:
        end = _LENGTH + int.from_bytes(blob[:_LENGTH], "little")
        reader = _Reader(blob, end)
        items = [reader.item(description) for description in json.loads(blob[_LENGTH:end])]
        if reader.position != len(blob):
            raise ValueError("its length is not what its header says")  # noqa: TRY301  # all complaints end below
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        RuntimeError,
    ) as error:  # RecursionError is a RuntimeError
        raise ConfigurationError(
            f"The {len(blob)} bytes that a rank sent as states of a metric cannot be read: {error}. "
            "Install the same version of dist_wandb on all ranks."
        ) from error
    return items


def dtype_of(name: str) -> torch.dtype:
    """The type of numbers with a name like `"float32"`.

    Raises:
        ValueError: There is none.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of numbers")  # noqa: TRY004  # a wrong name, not a wrong type
    return dtype


def _describe(item: Any, raw: list[bytes]) -> list[Any]:
    import torch

    if isinstance(item, torch.Tensor):
        numbers = item.detach().contiguous()
        raw.append(ctypes.string_at(numbers.data_ptr(), numbers.nbytes) if numbers.nbytes else b"")  # without numpy
        return ["tensor", str(numbers.dtype).removeprefix("torch."), list(numbers.shape)]
    if isinstance(item, bytes):
        raw.append(item)
        return ["bytes", len(item)]
    if isinstance(item, (list, tuple)):
        return ["tuple" if isinstance(item, tuple) else "list", [_describe(part, raw) for part in item]]
    if item is None or isinstance(item, (bool, int, float, str)):
        return ["value", item]
    raise ConfigurationError(f"A metric's state holds a {type(item).__name__}, which cannot be sent to other ranks.")


class _Reader:
    """Reads items from a blob, one after another.

    Args:
        blob: The bytes.
        position: Where the raw numbers begin.
    """

    def __init__(self, blob: bytes, position: int) -> None:
        self.position = position
        self._blob = blob

    def item(self, description: Sequence[Any]) -> Any:
        kind, *details = description
        if kind == "tensor":
            return self._tensor(*details)
        if kind == "bytes":
            return self._bytes(*details)
        if kind in {"list", "tuple"}:
            items = [self.item(part) for part in details[0]]
            return tuple(items) if kind == "tuple" else items
        if kind == "value":
            return details[0]
        raise ValueError(f"{kind!r} is no kind of item")

    def _bytes(self, size: int) -> bytes:
        if not 0 <= size <= len(self._blob) - self.position:
            raise ValueError(f"{size} bytes are missing at its end")
        self.position += size
        return self._blob[self.position - size : self.position]

    def _tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        import torch

        dtype = dtype_of(name)
        if min(shape, default=0) < 0:
            raise ValueError(f"{shape} is no shape")
        raw = self._bytes(math.prod(shape) * dtype.itemsize)
        if not raw:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(tuple(shape))
