"""Several pieces of bytes as one: each with its length in front."""

from __future__ import annotations

from dist_wandb.errors import ConfigurationError

_LENGTH = 8  # bytes of a length


def framed(*parts: bytes) -> bytes:
    """Bytes that `unframed` takes apart again."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_LENGTH, "little"), part))


def unframed(data: bytes, what: str = "a table or images") -> list[bytes]:
    """What was put together by `framed`.

    Args:
        data: The bytes.
        what: What they are to be, for the message.

    Raises:
        ConfigurationError: The bytes are something else.
    """
    parts, position = [], 0
    while position < len(data):
        start = position + _LENGTH
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise ConfigurationError(
                f"The {len(data)} bytes that a rank sent as {what} are cut off. Install the same version of "
                "dist_wandb on all ranks."
            )
        parts.append(data[start:position])
    return parts
