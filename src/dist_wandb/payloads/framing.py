"""Length-prefixed framing of bytes, and errors about malformed bytes from other ranks."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dist_wandb.errors import ConfigurationError

Bytes = bytes | bytearray | memoryview  # the bytes of a piece of a message

LARGE = 2**20  # bytes
_LENGTH = 8  # bytes of a length
_SHOWN = 100  # characters of received values, in messages


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
    """Return the beginning of the repr of a received value, for messages."""
    return repr(value)[:_SHOWN]
