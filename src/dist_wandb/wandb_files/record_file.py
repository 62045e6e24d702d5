"""W&B's record files (``.wandb``): read, and copied without the lines that were uploaded before.

A file consists of a header of seven bytes and a log in blocks of 32 KiB, in LevelDB's format: a record is one chunk or
more, and each chunk has a checksum. A record is a protobuf message; the number of its one field is its kind.
`wandb.proto.wandb_internal_pb2` is not used because parsing a hostile message takes 44 times its size in memory.

The end of a run imports this module, so it defines no dataclass and no named tuple: these evaluate text, after which
Python forgets a Ctrl-C that ends the process, as in `exchange.collective`, and exits with code 1.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import Directory, open_ordinary, time_limit

FILE_HEADER = b":W&B\xe1\xbe\x00"
_BLOCK = 32_768
_CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_GAP, _FULL, _FIRST, _MIDDLE, _LAST = range(5)  # kinds of chunks: nothing, a whole record, or a part of one

_CHECKSUMS = {kind: zlib.crc32(bytes([kind])) for kind in (_FULL, _FIRST, _MIDDLE, _LAST)}
VARINT, _FIXED_64, BYTES, _GROUP, _END_OF_GROUP, _FIXED_32 = range(6)  # protobuf's wire types
_HISTORY, _STATS, _OUTPUT_RAW, _RUN, _EXIT = 2, 7, 13, 17, 18  # numbers of fields of W&B's Record
ENVELOPE = frozenset({1, 16, 19, 200})  # number, control, id, and the run's info: its fields that are no kinds
_NEAR_THE_START = 64  # records; W&B writes a header, and then the run
_LINE_OF_OUTPUT = 3  # number of a field of W&B's OutputRawRecord
CONTINUES = 0x80
_LONGEST_VARINT, _LARGEST_VARINT = 10, 2**64 - 1
_LARGEST_NUMBER = 2**29 - 1  # of a field
MOST_FIELDS = 1000  # of a message; W&B's messages have fewer than ten
MOST_BYTES = 256 * 2**20  # of a record
# Processor time for all records of a file, with what is done with them; a file of W&B's takes less than a tenth.
SECONDS, SECONDS_PER_MIB = 10.0, 0.5

Field = tuple[int, int, int, int]  # number of a field, start of the field, and start and end of its content


class MalformedError(ValueError):
    """A message that protobuf would reject."""


Revise = Callable[[bytes, list[Field]], bytes]
"""Returns the record to copy, given a record and its fields. An exception ends the copy."""


def copy_without(
    opened: BinaryIO,
    copy: BinaryIO,
    revise: Revise | None = None,
    *,
    history: int = 0,
    events: int = 0,
    console: int = 0,
) -> None:
    """Copy a record file without the first lines of its streams. All other records are kept in order, the end last.

    W&B writes what it found out about the machine, which takes a moment, behind the end of a run that is over sooner.
    ``wandb sync`` then fails to send it ("called UploadNow() after Finish()"), so the record of the end is moved.

    Damaged and incomplete records are left out: ``wandb sync`` would stop at the first of them with an error. Lines of
    console output are counted by line breaks, so the cut may be a few lines off with progress bars, which write a line
    several times. Raises as `records` does.
    """
    left = {_HISTORY: history, _STATS: events, _OUTPUT_RAW: console}
    end = b""
    copy.write(FILE_HEADER)
    for record, parts in records(opened):
        kind = next((number for number, *_ in parts if number in left), 0)
        if left.get(kind, 0) > 0:
            left[kind] -= _line_breaks(record, parts) if kind == _OUTPUT_RAW else 1
        else:
            kept = record if revise is None else revise(record, parts)
            if any(number == _EXIT for number, *_ in parts):
                end = kept
            else:
                write_record(copy, kept)
    if end:
        write_record(copy, end)


class RecordFile:
    """An open record file. It can be read again for what was added."""

    def __init__(self, opened: BinaryIO, most: int) -> None:
        self.damaged: int = 0  # number of blocks of which a part has a wrong checksum or length
        self.too_long: int = 0  # number of records of more bytes than `most`
        self.is_cut_off: bool = False  # whether the file ends within a record
        self.place: int = 0  # of the next chunk
        self._opened = opened
        self._most = most
        # The chunks of an incomplete record, joined at its end: repeated addition would take quadratic time.
        self._begun: list[bytes] | None = None
        self._size = 0  # of these

    def records(self) -> Iterator[bytes]:
        # Records that are too long, or have wrong checksums, are skipped. Raises `ReadError` if the file does not start
        # like a record file, or all of them take too long.
        for kind, chunk in self._chunks():
            if kind in (_GAP, _FULL, _FIRST):  # an earlier incomplete record is dropped
                self._begun, self._size = None if kind == _GAP else [], 0
            if self._begun is None:
                continue
            self._size += len(chunk)
            self._begun.append(chunk)
            if self._size > self._most:
                self.too_long += 1
                self._begun = None
            elif kind in (_FULL, _LAST):
                record, self._begun = b"".join(self._begun), None
                yield record
        self.is_cut_off |= self._begun is not None

    def _chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield kind and content of each chunk. After a damaged one, the rest of the block is skipped."""
        size = self._opened.seek(0, os.SEEK_END) - self.place
        check_time = time_limit(SECONDS + SECONDS_PER_MIB * size / 2**20)
        if not self.place:
            self._opened.seek(0)
            header = self._opened.read(len(FILE_HEADER))
            if not FILE_HEADER.startswith(header):
                raise _no_record_file()
            self.place = len(FILE_HEADER) if header == FILE_HEADER else 0
            self.is_cut_off = bool(header)
        room = end = 0
        while self.place and room == end:
            self._opened.seek(self.place)
            room = _BLOCK - self.place % _BLOCK  # bytes to the end of the block
            block, end = self._opened.read(room), 0
            check_time()
            while len(block) - end >= _CHUNK_HEADER.size:
                checksum, length, kind = _CHUNK_HEADER.unpack_from(block, end)
                begin, stop = end + _CHUNK_HEADER.size, end + _CHUNK_HEADER.size + length
                if len(block) < min(stop, room):  # cut off, or still being written
                    break
                chunk, end = block[begin:stop], stop
                if kind not in _CHECKSUMS or len(chunk) != length or zlib.crc32(chunk, _CHECKSUMS[kind]) != checksum:
                    self.damaged += bool(checksum or length or kind)  # zeros are padding
                    kind, chunk, end = _GAP, b"", room
                yield kind, chunk
            self.is_cut_off = end < len(block) < room
            end = room if len(block) == room else end  # less than a chunk's header may be left, as padding
            self.place += end


def records(opened: BinaryIO, place: int = 0) -> Iterator[tuple[bytes, list[Field]]]:
    # Begins at `place`, the start of a block. Invalid records are skipped. Raises `ReadError` if the file does not
    # start like a record file, a record has more than `MOST_BYTES` bytes, or all of them take too long. The error does
    # not name the file.
    file = RecordFile(opened, MOST_BYTES)
    file.place = place
    for record in file.records():
        with suppress(MalformedError):
            yield record, fields(record)
        if file.too_long:
            break
    if not file.place:
        raise _no_record_file()
    if file.too_long:
        raise ReadError(f"contains a record of more than {MOST_BYTES} bytes, which W&B never writes.")


def records_of(source: Path, within: Directory | None = None) -> Iterator[tuple[bytes, list[Field]]]:
    """As `records`, by the path of a file; also raises as `open_ordinary` does."""
    with os.fdopen(open_ordinary(source, within=within), "rb") as opened:
        yield from records(opened)


def run_record_of(source: Path, within: Directory | None = None) -> bytes | None:
    """Return the first run record, which W&B makes unique for each writer; `None` if the first records have none."""
    with os.fdopen(open_ordinary(source, within=within), "rb") as opened, suppress(ReadError):
        for record, parts in islice(records(opened), _NEAR_THE_START):
            if any(number == _RUN for number, *_ in parts):
                return record
    return None


def has_end(source: Path) -> bool:
    """Return whether a file has the record of the run's end, which may not be the last one, in its last two blocks."""
    with os.fdopen(open_ordinary(source), "rb") as opened, suppress(ReadError):
        place = max(0, (os.fstat(opened.fileno()).st_size - 1) // _BLOCK - 1) * _BLOCK
        return any(number == _EXIT for _, parts in records(opened, place) for number, *_ in parts)
    return False


def write_record(opened: BinaryIO, record: bytes) -> None:
    rest, is_first = memoryview(record), True
    while is_first or rest:
        room = _BLOCK - opened.tell() % _BLOCK - _CHUNK_HEADER.size
        if room < 0:
            opened.write(bytes(room + _CHUNK_HEADER.size))
            continue
        chunk, rest = rest[:room], rest[room:]
        kind = (_FIRST if rest else _FULL) if is_first else (_MIDDLE if rest else _LAST)
        checksum = zlib.crc32(chunk, _CHECKSUMS[kind])
        opened.write(_CHUNK_HEADER.pack(checksum, len(chunk), kind))
        opened.write(chunk)
        is_first = False


def _line_breaks(record: bytes, parts: Iterable[Field]) -> int:
    with suppress(MalformedError):
        return sum(
            record.count(b"\n", begin, end)
            for number, _, start, stop in parts
            if number == _OUTPUT_RAW
            for field, _, begin, end in fields(record, start, stop)
            if field == _LINE_OF_OUTPUT
        )
    return 0


def _no_record_file() -> ReadError:
    return ReadError("does not start like a .wandb file.")


def fields(message: bytes, start: int = 0, stop: int | None = None, most: int = MOST_FIELDS) -> list[Field]:
    # The content of a numeric field is empty. Raises `MalformedError` if the message is truncated or invalid, and
    # `ReadError` if it is valid, but not in W&B's format, or has more than `most` fields.
    position, stop = start, len(message) if stop is None else stop
    found: list[Field] = []
    while position < stop:
        first, tag, position = position, message[position], position + 1
        if tag & CONTINUES:
            tag, position = varint(message, first, stop)
        number, wire_type = tag >> 3, tag & 7
        begin = end = position
        if wire_type == VARINT:
            _, position = varint(message, position, stop)
        elif wire_type == BYTES:
            length, begin = varint(message, position, stop)
            position = end = begin + length
        elif wire_type in (_FIXED_32, _FIXED_64):
            position += 4 if wire_type == _FIXED_32 else 8
        elif wire_type in (_GROUP, _END_OF_GROUP):
            raise ReadError(f"contains a record with a group (field {number}), which W&B never writes.")
        else:
            raise MalformedError(f"field {number} has the invalid type {wire_type}")
        if not 1 <= number <= _LARGEST_NUMBER:
            raise MalformedError(f"a field has the number {number}")
        if position > stop:
            raise MalformedError(f"field {number} is cut off")
        if len(found) == most:
            raise ReadError(f"contains a record of more than {most} fields, which W&B never writes.")
        found.append((number, first, begin, end))
    return found


def field_of(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | BYTES) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    written = bytearray()
    while value >= CONTINUES:
        written.append(value & ~CONTINUES & 0xFF | CONTINUES)
        value >>= 7
    written.append(value)
    return bytes(written)


def varint(message: bytes, position: int, stop: int) -> tuple[int, int]:
    """Parse a varint; return it and the position after it."""
    if position < stop and not message[position] & CONTINUES:  # the most frequent case
        return message[position], position + 1
    value = 0
    for count, byte in enumerate(message[position : min(position + _LONGEST_VARINT, stop)]):
        value |= (byte & ~CONTINUES) << 7 * count
        if not byte & CONTINUES:
            if value > _LARGEST_VARINT:
                break
            return value, position + count + 1
    raise MalformedError("a number is cut off, or larger than 64 bits")
