"""W&B's record files (``.wandb``), as far as an upload that was cut off needs them: a copy without what has arrived.

A file is a header of seven bytes and then a log in blocks of 32 KiB, in the manner of LevelDB: each record is one chunk
or several, and each chunk has a checksum. A record is a protobuf message, told apart by the number of its one field.
Messages are not parsed by `wandb.proto.wandb_internal_pb2`: it takes 44 times the size of a hostile one in memory.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import open_ordinary

_FILE_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK = 32_768
_CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_KINDS = _FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_DAMAGED = 0
_VARINT, _FIXED_64, _BYTES, _GROUP, _END_OF_GROUP, _FIXED_32 = range(6)  # protobuf's wire types
_HISTORY, _STATS, _OUTPUT_RAW = 2, 7, 13  # numbers of fields of W&B's Record
_RUN = 17
_NEAR_THE_START = 64  # records; W&B writes a header, and then the run
_LINE_OF_OUTPUT = 3  # and of its OutputRawRecord
_CONTINUES = 0x80
_LONGEST_VARINT, _LARGEST_VARINT = 10, 2**64 - 1
_LARGEST_NUMBER = 2**29 - 1  # of a field
_MOST_FIELDS = 1000  # of a message; those that are looked at here have fewer than ten

MOST_BYTES = 256 * 2**20
"""Of one record; larger ones are refused."""

Field = tuple[int, int, int]
"""Number of a field, and where its content begins and ends."""

Part = tuple[int, int, int, int]
"""Number of a field, where it begins, and where its content begins and ends."""


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


class MalformedError(ValueError):
    """A message that protobuf would not read."""


Revise = Callable[[bytes, list[Field]], bytes]
"""What becomes of a record, given its fields; what it raises ends the copy."""


def copy_without(source: Path, target: Path, first: Lines, revise: Revise | None = None) -> None:
    """Copy a record file, but for the first lines of its streams. All other records stay as and where they are.

    Records that are damaged, or were not written to their end as the process was killed, are left out: ``wandb sync``
    would stop at the first of them, with an error.

    Args:
        source: A ``.wandb`` file.
        target: The copy; replaced if it is there.
        first: How many lines of each stream to leave out. Console output ends lines where it has a line break, so with
            progress bars, which write a line several times, the cut may be a few lines off.
        revise: What becomes of each record that is copied; `None` for all as they are.

    Raises:
        ReadError: `source` is no record file, or has records as W&B writes none.
        OSError: `target` cannot be written.
    """
    with os.fdopen(open_ordinary(source), "rb") as opened, target.open("wb") as copy:
        try:
            write_without(opened, copy, first, revise)
        except ReadError as error:
            raise ReadError(f"{source}: {error}") from None


def records_of(source: Path) -> Iterator[tuple[bytes, list[Field]]]:
    """The records of a file with their fields, as `copy_without` would copy them.

    Raises:
        ReadError: `source` is no record file, or has records as W&B writes none.
        OSError: It cannot be read.
    """
    with os.fdopen(open_ordinary(source), "rb") as opened:
        for record in records(opened):
            with suppress(MalformedError):
                yield record, fields(record)


def run_record_of(source: Path) -> bytes | None:
    """The first record of a file that describes its run, as it stands there; `None` if there is none near its start.

    W&B writes it when the run is opened, once for each writer, with a time and a random text in it.

    Raises:
        ReadError: `source` is no ordinary file.
        OSError: It cannot be read.
    """
    with os.fdopen(open_ordinary(source), "rb") as opened, suppress(ReadError):
        for record in islice(records(opened), _NEAR_THE_START):
            with suppress(MalformedError):
                if any(number == _RUN for number, _, _ in fields(record)):
                    return record
    return None


def write_without(opened: BinaryIO, copy: BinaryIO, first: Lines, revise: Revise | None = None) -> None:
    """As `copy_without`, from one open file to another; the errors do not say of which file they are."""
    history, events, console = first.history, first.events, first.console
    writer = _Writer(copy)
    for record in records(opened):
        try:
            parts = fields(record)
        except MalformedError:
            continue
        kind = next((number for number, _, _ in parts if number in (_HISTORY, _STATS, _OUTPUT_RAW)), 0)
        if kind == _HISTORY and history > 0:
            history -= 1
        elif kind == _STATS and events > 0:
            events -= 1
        elif kind == _OUTPUT_RAW and console > 0:
            console -= _line_breaks(record, parts)
        else:
            writer.write(record if revise is None else revise(record, parts))


def records(opened: BinaryIO) -> Iterator[bytes]:
    """The records of a file whose checksums are right, one after the other.

    Raises:
        ReadError: It does not begin like a record file, or a record has more than `MOST_BYTES`.
    """
    if opened.read(len(_FILE_HEADER)) != _FILE_HEADER:
        raise ReadError("does not begin like a .wandb file.")
    begun: list[bytes] | None = None  # put together at the end: added up one by one, the time would be quadratic
    size = 0
    for kind, chunk in _chunks(opened):
        if kind in (_FULL, _FIRST):  # one that was begun before lost its end
            begun, size = [], 0
        elif kind == _DAMAGED:
            begun = None
        if begun is None:
            continue
        size += len(chunk)
        if size > MOST_BYTES:
            raise ReadError(f"has a record of more than {MOST_BYTES} bytes, as W&B writes none.")
        if chunk:
            begun.append(chunk)
        if kind in (_FULL, _LAST):
            record, begun = b"".join(begun), None
            yield record


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


def _checksum(kind: int, chunk: bytes | memoryview) -> int:
    return zlib.crc32(chunk, zlib.crc32(bytes([kind])))


class _Writer:
    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        self._place = opened.write(_FILE_HEADER)

    def write(self, record: bytes) -> None:
        rest, is_first = memoryview(record), True
        while True:
            room = _BLOCK - self._place % _BLOCK - _CHUNK_HEADER.size
            if room < 0:
                self._place += self._opened.write(bytes(room + _CHUNK_HEADER.size))
                continue
            chunk, rest = rest[:room], rest[room:]
            self._write_chunk((_FIRST if rest else _FULL) if is_first else (_MIDDLE if rest else _LAST), chunk)
            is_first = False
            if not rest:
                return

    def _write_chunk(self, kind: int, chunk: memoryview) -> None:
        self._place += self._opened.write(_CHUNK_HEADER.pack(_checksum(kind, chunk), len(chunk), kind))
        self._place += self._opened.write(chunk)


def _line_breaks(record: bytes, parts: Iterable[Field]) -> int:
    """The line breaks in the console output of a record."""
    try:
        lines = [
            (begin, end)
            for number, start, stop in parts
            if number == _OUTPUT_RAW
            for field, begin, end in fields(record, start, stop)
            if field == _LINE_OF_OUTPUT
        ]
    except MalformedError:
        return 0
    return sum(record.count(b"\n", begin, end) for begin, end in lines)


def fields(message: bytes, start: int = 0, stop: int | None = None) -> list[Field]:
    """The fields of a protobuf message; nothing of it is copied.

    Args:
        message: What holds the message.
        start: Where it begins.
        stop: Where it ends.

    Returns:
        For each field its number, and where its content begins and ends; a number has no content.

    Raises:
        MalformedError: It is no such message: cut off, or with numbers as there are none.
        ReadError: It is one, but not as W&B writes them.
    """
    return [(number, begin, end) for number, _, begin, end in _parts(message, start, stop, _MOST_FIELDS)]


def parts_of(message: bytes, start: int, stop: int, most: int) -> list[Part]:
    """As `fields`, of a message that may have many of them, and with the place where each field begins, tag and all."""
    return _parts(message, start, stop, most)


def _parts(message: bytes, start: int, stop: int | None, most: int) -> list[Part]:
    place, stop = start, len(message) if stop is None else stop
    found: list[Part] = []
    while place < stop:
        first = place
        tag, place = _varint(message, place, stop)
        number, wire_type = tag >> 3, tag & 7
        begin = end = place
        if wire_type == _VARINT:
            _, place = _varint(message, place, stop)
        elif wire_type == _BYTES:
            length, begin = _varint(message, place, stop)
            place = end = begin + length
        elif wire_type in (_FIXED_32, _FIXED_64):
            place += 4 if wire_type == _FIXED_32 else 8
        elif wire_type in (_GROUP, _END_OF_GROUP):
            raise ReadError(f"has a record with a group in it (field {number}), as W&B writes none.")
        else:
            raise MalformedError(f"field {number} is of the type {wire_type}, which there is not")
        if not 1 <= number <= _LARGEST_NUMBER:
            raise MalformedError(f"a field has the number {number}")
        if place > stop:
            raise MalformedError(f"field {number} is cut off")
        if len(found) == most:
            raise ReadError(f"has a record of more than {most} fields, as W&B writes none.")
        found.append((number, first, begin, end))
    return found


def field_of(number: int, content: bytes) -> bytes:
    """A field of bytes, as it stands in a message."""
    return _as_varint(number << 3 | _BYTES) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    written = bytearray()
    while value >= _CONTINUES:
        written.append(value & ~_CONTINUES & 0xFF | _CONTINUES)
        value >>= 7
    written.append(value)
    return bytes(written)


def _varint(message: bytes, place: int, stop: int) -> tuple[int, int]:
    """A number of variable length, and the place behind it."""
    if place < stop and not message[place] & _CONTINUES:  # as most are
        return message[place], place + 1
    value = 0
    for count, byte in enumerate(message[place : min(place + _LONGEST_VARINT, stop)]):
        value |= (byte & ~_CONTINUES) << 7 * count
        if not byte & _CONTINUES:
            if value > _LARGEST_VARINT:
                break
            return value, place + count + 1
    raise MalformedError("a number is cut off, or larger than 64 bits")
