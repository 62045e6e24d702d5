"""Bytes that ranks send: framed parts, tensors and plain values, and errors about malformed ones. Nothing is pickled.

Tensors and values are encoded as a JSON header and raw numbers; reading them executes no code. Only tensors of plain
numeric types are supported. From raw bytes, torch would also make a quantized tensor, without its scale, and crash the
process at its first use.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dist_wandb.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

Bytes = bytes | bytearray | memoryview  # the bytes of a piece of a message

LARGE = 2**20  # bytes
_LENGTH = 8  # bytes of a length
_SHOWN = 100  # characters of received values, in messages
_LARGEST = 2**31  # maximum bytes of a tensor; for an empty one, dimensions of size 0 count as 1
_MOST_DIMENSIONS = 64  # torch's own limit
_STATES = "states of a metric"
_NUMBERS = frozenset(
    ["bool", "bfloat16", "complex64", "complex128", "float16", "float32", "float64"]
    + [f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)]
)


def framed(*parts: bytes) -> bytes:
    """Join parts, each preceded by its length."""
    return b"".join(frame(*([part] for part in parts)))


def frame(*parts: Sequence[Bytes]) -> list[Bytes]:
    """Return what `framed` joins; each part is given and returned in pieces."""
    return [piece for part in parts for piece in (sum(map(len, part)).to_bytes(_LENGTH, "little"), *part)]


def memory(size: int) -> memoryview:
    """Return zeroed memory. If it is large, the system gets it back once it is freed; malloc often keeps it."""
    return memoryview(bytearray(size) if size < LARGE else mmap.mmap(-1, size))


def unframed(data: bytes, what: str = "a table or images") -> list[bytes]:
    """Split bytes into the parts that `framed` joined. For `what`, and malformed bytes, see `parsing`."""
    parts, position = [], 0
    with parsing(data, what):
        while position < len(data):
            start = position + _LENGTH
            position = start + int.from_bytes(data[position:start], "little")
            if position > len(data):
                raise ValueError("they are cut off")
            parts.append(data[start:position])
    return parts


@contextmanager
def parsing(data: bytes, what: str) -> Iterator[None]:
    """Turn errors in the block, which parses bytes from a rank, into a ConfigurationError that says `what` they are."""
    try:
        yield
    except ConfigurationError:
        raise
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:  # also a RecursionError
        raise ConfigurationError(
            f"The {len(data)} bytes that a rank sent as {what} cannot be read: {error}. Install the same version of "
            "dist_wandb on all ranks."
        ) from error


def excerpt(value: object) -> str:
    return repr(value)[:_SHOWN]


# --- tensors and plain values -----------------------------------------------------------------------------------------


def encode(items: Sequence[Any]) -> bytes:
    """Encode tensors on the CPU, dtypes, numbers, text, bytes, `None`, and lists of these; else ConfigurationError."""
    return b"".join(pieces_of(items))


def pieces_of(items: Sequence[Any]) -> list[Bytes]:
    """Return what `encode` joins. Tensors are not copied, so they must not change."""
    raw: list[Bytes] = []
    header = json.dumps([_describe(item, raw) for item in items], separators=(",", ":")).encode()
    return frame([header], *([piece] for piece in raw))


def decode(blob: bytes) -> list[Any]:
    """Decode the output of `encode`; raise ConfigurationError if it is malformed."""
    with parsing(blob, _STATES):
        header, *pieces = unframed(blob, _STATES)
        raw = iter(pieces)
        items = [_item(description, raw) for description in json.loads(bytes(header))]
        if next(raw, None) is not None:
            raise ValueError("they have more parts than their header")
    return items


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name like `"float32"`; raise ValueError if it is not supported."""
    import torch

    if name not in _NUMBERS:
        raise ValueError(f"{excerpt(name)} is not a type of numbers that metrics have")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _describe(item: Any, raw: list[Bytes]) -> list[Any]:
    import torch

    if isinstance(item, torch.Tensor):
        name = _name_of(item.dtype)
        tensor = item.detach().contiguous()
        if tensor.nbytes:  # its memory, without numpy
            held: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
            held.tensor = tensor  # lives as long
            raw.append(memoryview(held).cast("B"))
        else:
            raw.append(b"")
        return ["tensor", name, list(item.shape)]
    if isinstance(item, bytes):
        raw.append(item)
        return ["bytes", len(item)]
    if isinstance(item, (list, tuple)):
        return ["tuple" if isinstance(item, tuple) else "list", [_describe(part, raw) for part in item]]
    if isinstance(item, torch.dtype):
        return ["dtype", _name_of(item)]
    if item is None or isinstance(item, (bool, int, float, str)):
        return ["value", item]
    raise ConfigurationError(f"A metric's state holds a {type(item).__name__}, which cannot be sent to other ranks.")


def _name_of(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _NUMBERS:
        raise ConfigurationError(f"A metric's state holds {name} numbers, which cannot be sent to other ranks.")
    return name


def _item(description: Sequence[Any], raw: Iterator[bytes]) -> Any:
    kind, *details = description
    if kind == "tensor":
        return _tensor(raw, *details)
    if kind == "bytes":
        return bytes(_piece(raw, *details))
    if kind in {"list", "tuple"}:
        items = [_item(part, raw) for part in details[0]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dtype":
        return dtype_of(*details)
    if kind == "value" and isinstance(details[0], (bool, int, float, str, type(None))):
        return details[0]
    raise ValueError(f"{excerpt(kind)} is not a kind of item")


def _piece(raw: Iterator[bytes], size: int) -> bytes:
    piece = next(raw, b"")
    if type(size) is not int or len(piece) != size:
        raise ValueError(f"one of its parts has {len(piece)} bytes instead of {excerpt(size)}")
    return piece


def _tensor(raw: Iterator[bytes], name: str, shape: Sequence[int]) -> torch.Tensor:
    import torch

    dtype = dtype_of(name)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{excerpt(shape)} is not a shape")
    if len(shape) > _MOST_DIMENSIONS or math.prod(size or 1 for size in shape) * dtype.itemsize > _LARGEST:
        raise ValueError(f"a tensor of shape {excerpt(shape)} is too large")
    piece = _piece(raw, math.prod(shape) * dtype.itemsize)
    if not piece:
        return torch.empty(shape, dtype=dtype, device="cpu")
    copied = memory(len(piece))
    copied[:] = piece
    if dtype is torch.bool:  # a tensor of bytes other than 0 and 1 would have undefined values
        return torch.frombuffer(copied, dtype=torch.uint8).ne(0).reshape(shape)
    return torch.frombuffer(copied, dtype=dtype).reshape(shape)
