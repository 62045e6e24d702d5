"""Decode the history rows of a large ``.wandb`` file; nearly all of its bytes are rows.

W&B's reader takes 0.1 ms of processor time for a row of 20 numbers, half of it for the summary that W&B writes again
with each row, and its output must be parsed as JSON again. Therefore `split` copies only the other records of a file
for W&B's reader, and `Rows` decodes the rows. A row is a `HistoryRecord` message of W&B's ``wandb_internal.proto``:
items with a name and a value in JSON. Names of nested mappings are joined by dots, as W&B's reader does.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import threading
from collections.abc import Collection, Iterator
from decimal import Decimal
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.record_file import (
    BYTES,
    CONTINUES,
    MOST_FIELDS,
    MalformedError,
    Writer,
    parts_of,
    records,
    varint,
)
from dist_wandb.wandb_files.small_files import Directory, is_deeper, open_ordinary

LARGE = 2**20
"""Size of a file in bytes from which splitting it is faster."""

KINDS = {"history": 2, "summary": 3, "output": 4, "stats": 7, "output_raw": 13, "telemetry": 26}
"""Numbers of fields of W&B's ``Record`` by kind."""

_MOST_COPIED = 64 * 2**20  # bytes of all other records
_LARGEST_RECORD = 8 * 2**20  # bytes, the limit of a line of W&B's reader
_BETWEEN_CHECKS = 64  # records between two checks whether to stop
_MOST_ITEMS = 100_000  # of one row
_MOST_NAMES = 20_000  # that are cached
_ITEM, _KEY, _NESTED_KEY, _VALUE = 1, 1, 2, 16  # numbers of fields of HistoryRecord and HistoryItem
_LARGEST_INTEGER = 2**63  # W&B's reader prints larger integers as floats
_FIRST_WITH_EXPONENT = 1e21  # W&B's reader prints smaller floats without a fraction as integers
_LESS = bytes((length - 3) % 256 for length in range(256))  # 3 bytes are between an item's names and its value
# An item with a number: the item's length; the names, each with tag and length; the value's length; the value.
_NUMBER = re.compile(
    rb"\n([\x01-\x7f])([\n\x12][^\x82]{1,120})\x82\x01([\x01-\x7f])"
    rb"(-?(?:0|[1-9][0-9]{0,40})(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,4})?|NaN|-?Infinity)"
)
_LOOSE = re.compile(r'("(?:[^"\\]|\\.)*")|(-?)0*([0-9]+)(?:\.([0-9]*))?', re.DOTALL)  # a text, or the start of a number
_SURROGATE = re.compile("[\ud800-\udfff]")  # json has joined those of pairs
_JSON = json.JSONDecoder()
_STEP = re.compile(rb"\x12(?:\x00|.\x08[\x80-\xff]{0,8}[\x00-\x7f])", re.DOTALL)  # a row's last field; 0 is left out
_OTHER_TEXTS = (7, 8)  # numbers of fields of HistoryItem
_MESSAGES = {2: (), 200: (1, 100)}  # HistoryRecord's other messages, and the numbers of their texts
_NUMBER_OF_RECORD = 0x08  # the tag of a record's first field


def split(
    source: Path,
    others: Path,  # the copy; its parent directory is created
    skipped: Collection[str],  # of `KINDS`
    stopped: threading.Event,  # set to stop reading
    within: Directory | None = None,  # as for `open_ordinary`
) -> int | None:
    """Copy the records of a file without its history rows and skipped kinds; return the number of rows for `Rows`.

    Returns `None` if W&B's reader should read the whole file, because it is damaged or truncated, or a part of it is
    very large. The copy is incomplete then.
    """
    left_out = {KINDS[kind] for kind in skipped} | {KINDS["history"]}
    copied = rows = 0
    others.parent.mkdir(parents=True)
    try:
        with others.open("xb") as copy:
            writer = Writer(copy)
            for record in _undamaged(source, stopped, within):
                number, _ = _only_field(record)
                if number in left_out:
                    rows += number == KINDS["history"]
                    continue
                copied += len(record)
                if copied > _MOST_COPIED:
                    return None
                writer.write(record)
    except (OSError, MalformedError, ReadError):  # W&B's reader will report the reason
        return None
    return rows


class Rows:
    """Decodes the first `count` history rows of a file that `split` has found to be undamaged."""

    def __init__(self, path: Path, count: int, stopped: threading.Event, within: Directory | None = None) -> None:
        self._path = path
        self._within = within
        self._count = count  # the file may have grown since `split`
        self._stopped = stopped
        self._names = _Names()
        self._malformed = 0
        self._deep = 0

    @property
    def problems(self) -> list[str]:
        """The rows that were skipped, as sentence fragments."""
        found = []
        if self._deep:
            found.append(f"{self._deep} of its rows, with too deeply nested values, are skipped")
        if self._malformed:
            found.append(f"{self._malformed} of its rows are malformed, and are skipped")
        return found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for record, begin in islice(self._records(), self._count):
            row = self._decoded(record, begin)
            if row is not None:
                yield row

    def _decoded(self, record: bytes, begin: int) -> dict[str, Any] | None:
        try:
            return self._names.row(record, begin)
        except (MalformedError, ReadError):
            self._malformed += 1
        except _TooDeepError:
            self._deep += 1
        return None

    def _records(self) -> Iterator[tuple[bytes, int]]:
        """Yield the records of rows, and the start of their contents."""
        try:
            for record in _undamaged(self._path, self._stopped, self._within):
                number, begin = _only_field(record)
                if number == KINDS["history"]:
                    yield record, begin
        except MalformedError as error:
            raise ReadError(f"has changed while it was read: {error}") from None


class _TooDeepError(ValueError):
    """A value has lists and objects that are nested too deeply."""


class _Names:
    """Decodes rows, and caches their names."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def row(self, record: bytes, begin: int) -> dict[str, Any]:
        """Return names and values of the row at `begin`; raise MalformedError, ReadError or _TooDeepError."""
        content = record[begin:]
        # What is between the items with numbers, and their four groups: nothing may be between them.
        parts = _NUMBER.split(content)
        between, lengths, names, value_lengths, values = (parts[place::5] for place in range(5))
        sizes, rest = bytes(map(len, values)), between[-1]
        together = bytes(map(add, map(len, names), sizes))  # at most 121 and 93
        if (
            not names
            or any(between[:-1])
            or b"".join(lengths).translate(_LESS) != together
            or b"".join(value_lengths) != sizes
            # Nothing, or only the row's step, follows its items.
            or (rest and not (_STEP.fullmatch(rest) is not None and rest[1] == len(rest) - 2))
        ):
            return self._any_row(content)
        try:
            known = list(map(self._known.__getitem__, names))
        except KeyError:
            return self._any_row(content)
        numbers, _ = _JSON.raw_decode(f"[{b','.join(values).decode()}]")
        return {name: number if number % 1 else _whole(number) for name, number in zip(known, numbers, strict=True)}

    def _any_row(self, content: bytes) -> dict[str, Any]:
        """Decode a row with any values, names sorted as by W&B's reader; empty, as there, if an item has no value."""
        row: dict[str, Any] = {}
        is_decoded = True
        for number, start, begin, end in parts_of(content, 0, len(content), _MOST_ITEMS):
            if content[start] & 7 != BYTES:
                continue
            if number == _ITEM:
                name, value = self._item(content, begin, end)
                is_decoded &= value is not None
                row[name] = value and value[0]
            elif number in _MESSAGES:
                for inner, first, text, last in parts_of(content, begin, end, MOST_FIELDS):
                    if inner in _MESSAGES[number] and content[first] & 7 == BYTES:
                        _text(content[text:last])
        return dict(sorted(row.items())) if is_decoded else {}

    def _item(self, content: bytes, begin: int, end: int) -> tuple[str, tuple[Any] | None]:
        """Return the name of an item, and its value; `None` if it has none."""
        keys: list[str] = []
        nested: list[str] = []
        value, text = b"", ""
        before_value = begin
        for number, start, first, last in parts_of(content, begin, end, MOST_FIELDS):
            if content[start] & 7 != BYTES:
                continue
            if number == _KEY:
                keys = [_text(content[first:last])]
            elif number == _NESTED_KEY:
                nested.append(_text(content[first:last]))
            elif number == _VALUE:
                value, before_value = content[first:last], start
                text = _text(value)
            elif number in _OTHER_TEXTS:
                _text(content[first:last])
        name = ".".join(nested or keys)
        blob = content[begin:before_value]
        if len(self._known) < _MOST_NAMES and len(blob) == sum(2 + len(key.encode()) for key in nested or keys):
            self._known.setdefault(blob, name)
        return name, (_value(value, text),) if value else None


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise MalformedError("a text is not UTF-8") from None


def _value(content: bytes, text: str) -> Any:
    """Decode a value of a row, which is also given as text. A value that is not JSON is returned as text."""
    if is_deeper(content):
        raise _TooDeepError
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:  # W&B's reader accepts leading zeros and a point without digits after it
            value = json.loads(_LOOSE.sub(_strict, text))
        except (ValueError, RecursionError):
            return text
    if type(value) in (int, float):
        return value if value % 1 else _whole(value)
    return _as_printed(value)


def _strict(found: re.Match[str]) -> str:
    text, sign, whole, fraction = found.groups()
    return text or f"{sign}{whole}{f'.{fraction}' if fraction else ''}"


def _as_printed(value: Any) -> Any:
    """Return text, or what is inside a list or object, as W&B's reader prints it; its JSON has no NaN, for example."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_as_printed(item) for item in value]
    if isinstance(value, dict):
        return {_as_printed(name): _as_printed(item) for name, item in value.items()}
    if type(value) in (int, float):
        number = value if value % 1 else _whole(value)
        return number if math.isfinite(number) else json.dumps(number)
    return value


def _whole(number: float) -> float:
    """Convert a number without a fraction as W&B's reader prints it."""
    if type(number) is int:
        if -_LARGEST_INTEGER <= number < _LARGEST_INTEGER:
            return number
        if abs(number) > sys.float_info.max:
            return math.inf if number > 0 else -math.inf
    number = float(number)
    return int(Decimal(repr(number))) if abs(number) < _FIRST_WITH_EXPONENT else number  # zeros after its digits


def _only_field(record: bytes) -> tuple[int, int]:
    """Return number and content start of a record's only field (except the record number); zeros if it has others."""
    size = len(record)
    position = 0
    try:
        if record[0] == _NUMBER_OF_RECORD:
            position = 2
            while record[position - 1] >= CONTINUES:
                position += 1
        tag, position = varint(record, position, size)
        length, position = varint(record, position, size)
    except (MalformedError, IndexError):
        return 0, 0
    return (tag >> 3, position) if tag & 7 == BYTES and position + length == size else (0, 0)


def _undamaged(path: Path, stopped: threading.Event, within: Directory | None) -> Iterator[bytes]:
    """Yield a file's records; raise `MalformedError` if it is damaged, `ReadError` if W&B does not write such."""
    with os.fdopen(open_ordinary(path, within=within), "rb") as opened:
        for count, record in enumerate(records(opened, most=_LARGEST_RECORD, strict=True)):
            if not count % _BETWEEN_CHECKS and stopped.is_set():
                raise ReadError("was not read to its end because reading was interrupted.")
            yield record
