"""Check that bytes are exactly one PNG or JPEG image before a page shows them.

The browser decodes the images of a page. Only the two formats that W&B writes are accepted, with plausible sizes and no
bytes after their end.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import NamedTuple

_PNG = b"\x89PNG\r\n\x1a\n"
_LARGEST_SIDE = 16_384
_MOST_PIXELS = 64 * 2**20
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended and progressive
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9


class Picture(NamedTuple):
    """Media type and size in pixels of a checked image."""

    kind: str
    width: int
    height: int


def checked(content: bytes) -> Picture | None:
    """Return type and size of an image; `None` if the bytes are not a valid PNG or JPEG."""
    found = _png(content) if content.startswith(_PNG) else _jpeg(content)
    if found is None or not (0 < found.width <= _LARGEST_SIDE and 0 < found.height <= _LARGEST_SIDE):
        return None
    return found if found.width * found.height <= _MOST_PIXELS else None


def data_uri(content: bytes, picture: Picture) -> str:
    """Return a data URI with the bytes of a checked image."""
    return f"data:{picture.kind};base64,{base64.b64encode(content).decode('ascii')}"


def _png(content: bytes) -> Picture | None:
    position, size, has_data = len(_PNG), (0, 0), False
    while position + 12 <= len(content):
        (length,) = struct.unpack_from(">I", content, position)
        end = position + 12 + length
        if end > len(content):
            return None
        kind = content[position + 4 : position + 8]
        if zlib.crc32(content[position + 4 : end - 4]) != struct.unpack_from(">I", content, end - 4)[0]:
            return None
        if (position == len(_PNG)) != (kind == b"IHDR"):
            return None
        if kind == b"IHDR":
            if length != 13:  # noqa: PLR2004  # length of IHDR
                return None
            size = struct.unpack_from(">II", content, position + 8)
        has_data |= kind == b"IDAT"
        position = end
        if kind == b"IEND":
            return Picture("image/png", *size) if has_data and position == len(content) else None
    return None


def _jpeg(content: bytes) -> Picture | None:
    """Parse the segments of a JPEG up to its first scan. The bytes must end with an end-of-image marker."""
    if not content.startswith(b"\xff\xd8") or not content.endswith(bytes([0xFF, _END_OF_IMAGE])):
        return None
    position, size = 2, None
    while position + 4 <= len(content) and content[position] == 0xFF:  # noqa: PLR2004
        marker = content[position + 1]
        (length,) = struct.unpack_from(">H", content, position + 2)
        if marker in _JPEG_FRAMES and position + 9 <= len(content):
            size = struct.unpack_from(">HH", content, position + 5)
        if marker == _START_OF_SCAN:
            return Picture("image/jpeg", size[1], size[0]) if size else None
        position += 2 + max(2, length)
    return None
