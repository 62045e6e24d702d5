"""W&B's record files (``.wandb``), as far as an upload that was cut off needs them: a copy without what has arrived.

A file is a header of seven bytes and then a log in blocks of 32 KiB, in the manner of LevelDB: each record is one chunk
or several, and each chunk has a checksum. A record is a protobuf message, told apart by the number of its one field.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dist_wandb.errors import ReadError

_FILE_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK = 32_768
_CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_KINDS = _FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_DAMAGED = 0
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5  # protobuf's wire types
_HISTORY, _STATS, _OUTPUT_RAW = 2, 7, 13  # numbers of fields of W&B's Record
_LINE_OF_OUTPUT = 3  # and of its OutputRawRecord
_CONTINUES = 0x80


@dataclass(frozen=True)
class Lines:
    """How many lines of a run's three streams: what is sent line by line.

    Args:
        history: History rows.
        events: Samples of system metrics.
        console: Lines of console output.
    """

    history: int = 0
    events: int = 0
    console: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(self.history + other.history, self.events + other.events, self.console + other.console)

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Lines()


def copy_without(source: Path, target: Path, first: Lines) -> None:
    """Copy a record file, but for the first lines of its streams. All other records stay as and where they are.

    Records that are damaged, or were not written to their end as the process was killed, are left out: ``wandb sync``
    would stop at the first of them, with an error.

    Args:
        source: A ``.wandb`` file.
        target: The copy; replaced if it is there.
        first: How many lines of each stream to leave out. Console output ends lines where it has a line break, so with
            progress bars, which write a line several times, the cut may be a few lines off.

    Raises:
        ReadError: `source` is no record file.
        OSError: `target` cannot be written.
    """
    history, events, console = first.history, first.events, first.console
    with source.open("rb") as opened, target.open("wb") as copy:
        writer = _Writer(copy)
        for record in _records(opened, source):
            kind = _kind(record)
            if kind == _HISTORY and history > 0:
                history -= 1
            elif kind == _STATS and events > 0:
                events -= 1
            elif kind == _OUTPUT_RAW and console > 0:
                console -= _line_breaks(record)
            else:
                writer.write(record)


def _records(opened: BinaryIO, path: Path) -> Iterator[bytes]:
    """The records of a file that are whole."""
    if opened.read(len(_FILE_HEADER)) != _FILE_HEADER:
        raise ReadError(f"{path}: does not begin like a .wandb file.")
    begun: bytes | None = None
    for kind, chunk in _chunks(opened):
        if kind in (_FULL, _FIRST):  # one that was begun before lost its end
            begun = chunk
        elif kind == _DAMAGED:
            begun = None
        elif begun is not None:
            begun += chunk
        if kind in (_FULL, _LAST) and begun is not None:
            yield begun
            begun = None


def _chunks(opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The chunks; in the place of a damaged one nothing, as behind it chunks surely begin again with the next block."""
    while True:
        left = _BLOCK - opened.tell() % _BLOCK
        if left < _CHUNK_HEADER.size:  # the rest of a block that is too small for a chunk is padding
            opened.seek(left, os.SEEK_CUR)
            continue
        header = opened.read(_CHUNK_HEADER.size)
        if len(header) < _CHUNK_HEADER.size:
            return
        checksum, length, kind = _CHUNK_HEADER.unpack(header)
        chunk = opened.read(min(length, left - _CHUNK_HEADER.size))
        if kind in _KINDS and len(chunk) == length and _checksum(kind, chunk) == checksum:
            yield kind, chunk
        else:
            opened.seek(-opened.tell() % _BLOCK, os.SEEK_CUR)
            yield _DAMAGED, b""


def _checksum(kind: int, chunk: bytes) -> int:
    return zlib.crc32(chunk, zlib.crc32(bytes([kind])))


class _Writer:
    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        opened.write(_FILE_HEADER)

    def write(self, record: bytes) -> None:
        is_first = True
        while True:
            room = _BLOCK - self._opened.tell() % _BLOCK - _CHUNK_HEADER.size
            if room < 0:
                self._opened.write(bytes(room + _CHUNK_HEADER.size))
                continue
            chunk, record = record[:room], record[room:]
            self._write_chunk((_FIRST if record else _FULL) if is_first else (_MIDDLE if record else _LAST), chunk)
            is_first = False
            if not record:
                return

    def _write_chunk(self, kind: int, chunk: bytes) -> None:
        self._opened.write(_CHUNK_HEADER.pack(_checksum(kind, chunk), len(chunk), kind) + chunk)


def _kind(record: bytes) -> int:
    """The number of the field that makes the record what it is; 0 if it has none of those that matter here."""
    return next((number for number, _ in _fields(record) if number in (_HISTORY, _STATS, _OUTPUT_RAW)), 0)


def _line_breaks(record: bytes) -> int:
    output = next(content for number, content in _fields(record) if number == _OUTPUT_RAW)
    return sum(content.count(b"\n") for number, content in _fields(output) if number == _LINE_OF_OUTPUT)


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field of a protobuf message; the content of numbers is left out."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire_type = tag >> 3, tag & 7
        content = b""
        if wire_type == _VARINT:
            _, place = _varint(message, place)
        elif wire_type == _BYTES:
            length, place = _varint(message, place)
            content = message[place : place + length]
            place += length
        elif wire_type in (_FIXED_32, _FIXED_64):
            place += 4 if wire_type == _FIXED_32 else 8
        else:
            raise ReadError(f"A record of W&B's has a field {number} of the unknown type {wire_type}.")
        yield number, content


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & ~_CONTINUES) << shift
        place += 1
        if not byte & _CONTINUES:
            return value, place
        shift += 7
