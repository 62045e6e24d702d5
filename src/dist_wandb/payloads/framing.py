"""Several pieces of bytes as one, each with its length in front; and errors about bytes that a rank sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dist_wandb.errors import ConfigurationError

_LENGTH = 8  # bytes of a length
_SHOWN = 100  # characters of what was sent, in messages


def framed(*parts: bytes) -> bytes:
    """Bytes that `unframed` takes apart again."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_LENGTH, "little"), part))


def unframed(data: bytes, what: str = "a table or images") -> list[bytes]:
    """The parts that `framed` joined.

    Args:
        data: The bytes.
        what: What they are to be, for the message.

    Raises:
        ConfigurationError: The bytes are something else.
    """
    parts, position = [], 0
    with understanding(data, what):
        while position < len(data):
            start = position + _LENGTH
            position = start + int.from_bytes(data[position:start], "little")
            if position > len(data):
                raise ValueError("they are cut off")
            parts.append(data[start:position])
    return parts


@contextmanager
def understanding(data: bytes, what: str) -> Iterator[None]:
    """Turn errors in the block, which reads what a rank sent, into one with a message for users.

    Args:
        data: The bytes.
        what: What they are to be.

    Raises:
        ConfigurationError: The bytes are something else.
    """
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
    """The beginning of the repr of what was sent, for messages."""
    return repr(value)[:_SHOWN]
