"""Read logged tables and images from a run's directory, which is not trusted.

The browser decodes the images of a page. So bytes are shown only if they begin like a PNG or JPEG image, the formats
that W&B writes, with a plausible size. Of a damaged image the browser shows what it can.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import PurePosixPath
from typing import Any

from dist_wandb.cli.report.page import Part, plain
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.small_files import parse_json, read_small

MOST_MEDIA = 50  # names, of one file
STEPS = 4  # last rows kept of one name
_MOST_PICTURES = 24  # of one row
_LARGEST_PICTURE, _LARGEST_TABLE = 512 * 1024, 4 * 1024 * 1024  # bytes
_MOST_ROWS, _MOST_COLUMNS, _LONGEST_CELL = 100, 30, 200
KINDS_OF_MEDIA = _IMAGE, _IMAGES, _TABLE = "image-file", "images/separated", "table-file"

Logged = tuple[float, dict[str, Any]]
_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR"  # with length and kind of the first chunk, which begins with the size
_LARGEST_SIDE = 16_384
_MOST_PIXELS = 64 * 2**20
_JPEG_FRAMES = frozenset({0xC0, 0xC1, 0xC2})  # baseline, extended and progressive
_START_OF_SCAN = 0xDA


class MediaReader:
    """Reads media from the directories of runs. All of them take at most `room` bytes of the page."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._misses: Counter[str] = Counter()  # media of one file that are not shown, by reason

    def read(
        self, media: Mapping[str, Sequence[Logged]], left_out: int, of: StoredRun
    ) -> tuple[list[Part], list[Part], list[str]]:
        images: list[Part] = []
        tables: list[Part] = []
        self._misses.clear()
        for name, values in media.items():
            for x, value in reversed(values):
                if value["_type"] == _TABLE:
                    tables += self._table(name, x, value, of)
                    break  # only the last table
                images += self._images(name, x, value, of)
        if left_out:
            self._misses[f"media values beyond the first {MOST_MEDIA} names"] = left_out
        return images, tables, [f"{count} {reason}" for reason, count in self._misses.items()]

    def _images(self, name: str, x: float, value: Mapping[str, Any], of: StoredRun) -> Iterator[Part]:
        for path, caption in _pictures_of(value):
            content = self._content(path, _LARGEST_PICTURE, of)
            if content is None:
                continue
            picture = checked(content)
            if picture is None:
                self._misses["images that are not valid PNG or JPEG files"] += 1
            elif self._reserve(len(content) * 4 // 3, "images"):
                kind, width, height = picture
                uri = f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
                about = {"name": name, "step": x, "source": uri, "caption": plain(caption)[:_LONGEST_CELL]}
                yield {**about, "width": width, "height": height}

    def _table(self, name: str, x: float, value: Mapping[str, Any], of: StoredRun) -> Iterator[Part]:
        content = self._content(value.get("path"), _LARGEST_TABLE, of)
        if content is None:
            return
        try:
            found = table_of(name, x, parse_json(content))
        except ValueError:
            self._misses["tables that are not in W&B's format"] += 1
            return
        if self._reserve(sum(len(cell) + 4 for row in found["rows"] for cell in row), "tables"):
            yield found

    def _reserve(self, size: int, what: str) -> bool:
        if size > self._room:
            self._misses[f"{what} that do not fit into the page"] += 1
            return False
        self._room -= size
        return True

    def _content(self, path: object, limit: int, of: StoredRun) -> bytes | None:
        if not isinstance(path, str) or len(path) > 1000 or "\0" in path:  # noqa: PLR2004
            self._misses["media values without a valid path"] += 1
            return None
        inside = PurePosixPath(path)
        if inside.is_absolute() or ".." in inside.parts:
            self._misses["media files outside the run's directory"] += 1
            return None
        try:
            return read_small(of.directory.path / "files" / inside, limit=limit, within=of.directory)
        except FileNotFoundError:
            self._misses["media files that are missing"] += 1
        except (OSError, ReadError, UnicodeEncodeError):  # a link; a lone surrogate
            self._misses["media files that are links, too large, or cannot be read"] += 1
        return None


def _pictures_of(value: Mapping[str, Any]) -> list[tuple[object, str]]:
    if value["_type"] == _IMAGE:
        caption = value.get("caption")
        return [(value.get("path"), caption if isinstance(caption, str) else "")]
    names, captions = value.get("filenames"), value.get("captions")
    if not isinstance(names, list):
        return []
    pairs = zip_longest(names, captions if isinstance(captions, list) else [])
    shown = islice(pairs, min(len(names), _MOST_PICTURES))
    return [(name, caption if isinstance(caption, str) else "") for name, caption in shown]


def table_of(name: str, x: float, content: object) -> Part:
    columns, data = (content.get("columns"), content.get("data")) if isinstance(content, dict) else (None, None)
    if not isinstance(columns, list) or not isinstance(data, list):
        raise ValueError("it has no columns, or no data")  # noqa: TRY004
    rows = [row for row in data[:_MOST_ROWS] if isinstance(row, list)]
    return {
        "name": name,
        "step": x,
        "columns": [cell_text(column) for column in columns[:_MOST_COLUMNS]],
        "rows": [[cell_text(cell) for cell in row[:_MOST_COLUMNS]] for row in rows],
        "total": len(data),
    }


def cell_text(value: object) -> str:
    if isinstance(value, str):
        return plain(value)[:_LONGEST_CELL]
    if isinstance(value, dict) and isinstance(value.get("_type"), str):
        return f"[{plain(value['_type'])[:_LONGEST_CELL]}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    return plain(json.dumps(value, ensure_ascii=False))[:_LONGEST_CELL]


def checked(content: bytes) -> tuple[str, int, int] | None:
    """Return media type, width and height of an image; `None` if the bytes are not a valid PNG or JPEG."""
    if content.startswith(_PNG):
        has_size = len(content) > len(_PNG) + 8
        kind, size = "image/png", struct.unpack_from(">II", content, len(_PNG)) if has_size else None
    else:
        kind, size = "image/jpeg", _size_of_jpeg(content)
    if size is None or not (0 < size[0] <= _LARGEST_SIDE and 0 < size[1] <= _LARGEST_SIDE):
        return None
    return (kind, *size) if size[0] * size[1] <= _MOST_PIXELS else None


def _size_of_jpeg(content: bytes) -> tuple[int, int] | None:  # width and height, before its first scan
    if not content.startswith(b"\xff\xd8"):
        return None
    position, size = 2, None
    while position + 4 <= len(content) and content[position] == 0xFF:  # noqa: PLR2004
        marker = content[position + 1]
        (length,) = struct.unpack_from(">H", content, position + 2)
        if marker in _JPEG_FRAMES and position + 9 <= len(content):
            height, width = struct.unpack_from(">HH", content, position + 5)
            size = width, height
        if marker == _START_OF_SCAN:
            return size
        position += 2 + max(2, length)
    return None
