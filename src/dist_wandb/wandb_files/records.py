"""Read the records of a ``.wandb`` file: W&B has no Python reader, and a file may come from an untrusted source.

A record is a message ``Record`` of W&B's ``wandb_internal.proto``. Only the fields in `KINDS` are decoded. Nearly all
bytes of a large file are history rows: items with a name and a value in JSON. So the numbers of a row are parsed
together, and names are decoded once. Names of nested mappings are joined by dots; numbers without a fraction
are integers.

Protobuf is not used (see `record_file.py`), and would also be slower: a file of 27 MB is read in 0.55 s, and with
`wandb.proto` in 0.9 to 1.05 s, without what it takes to confine that to another process.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeAlias

from dist_wandb.errors import ReadError, in_words
from dist_wandb.wandb_files.record_file import BYTES, ENVELOPE, VARINT, MalformedError, RecordFile, fields, varint
from dist_wandb.wandb_files.small_files import Directory, is_deeper, open_ordinary

UNUSED = frozenset({"summary", "stats", "output_raw"})  # by most callers; most records of a file are of these kinds
_LARGEST_RECORD = 8 * 2**20  # bytes; larger ones are skipped
_MOST_ITEMS = 100_000  # of one record
_MOST_NAMES = 20_000  # that are cached
_HISTORY = 2  # number of a field of Record
_ITEM, _KEY, _NESTED_KEY, _VALUE = 1, 1, 2, 16  # numbers of fields of HistoryRecord, and of all items
_LONGEST_PLAIN = 127  # bytes of an item whose lengths are one byte each
_VALUE_TAG = b"\x82\x01"  # of an item's value
NUMBERS = frozenset({int, float})  # without bool
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for these
_FIRST_WITH_EXPONENT = 1e21  # smaller floats without a fraction are integers
_PLAIN_JSON = json.JSONDecoder()
_SURROGATE = re.compile("[\ud800-\udfff]")  # json has joined those of pairs

_Schema: TypeAlias = "Mapping[int, tuple[str, Callable[[Sequence[bytes]], Any] | Mapping[int, Any] | None]]"

Record: TypeAlias = tuple[str, dict[str, Any]]  # kind and contents; of a row, its names and values
PAUSE: Record = ("", {})  # stands for the present end of a file that is followed


def read_records(
    path: Path,
    problems: list[str] | None = None,  # gets the damaged parts that were skipped, at the end, as sentence fragments
    *,
    skipped: Collection[str] = UNUSED,  # kinds that are left out
    follow: bool = False,  # whether to yield `PAUSE` at the end of the file, and then continue with what was added
    within: Directory | None = None,  # as for `open_ordinary`
) -> Iterator[Record]:
    # Yields records of a kind in `KINDS`. NaN and infinities in rows and summaries are floats; elsewhere they are text,
    # as JSON can print it. Raises `ReadError` if it is no ordinary file, or not one of W&B's, or takes too long.
    decoder = Decoder(skipped)
    try:
        with os.fdopen(open_ordinary(path, within=within), "rb") as opened:
            file, size = RecordFile(opened, _LARGEST_RECORD), os.fstat(opened.fileno()).st_size
            yield from filter(None, map(decoder.decoded, file.records()))
            while follow:
                yield PAUSE
                yield from filter(None, map(decoder.decoded, file.records()))
            if os.fstat(opened.fileno()).st_size < size:
                raise ReadError("has changed while it was read: it is shorter now.")  # noqa: TRY301
    except FileNotFoundError:
        raise ReadError(f"{path}: is not a file. Give a .wandb file.") from None
    except OSError as error:
        raise ReadError(f"{path}: the .wandb file cannot be read: {error.strerror or error}.") from None
    except ReadError as error:
        raise ReadError(in_words(error, path)) from None
    found = {
        "reached the end of an incomplete .wandb file (the run may still be active or was interrupted)": (
            file.is_cut_off
        ),
        "skipped corrupt data (of a wrong checksum or length)": file.damaged,
        f"{file.too_long} of its records, of more than {_LARGEST_RECORD} bytes, are skipped": file.too_long,
        f"{decoder.deep} of its records, with too deeply nested values, are skipped": decoder.deep,
        f"{decoder.malformed} of its records, not in W&B's format, are skipped": decoder.malformed,
    }
    if problems is not None:
        problems += filter(found.__getitem__, found)


class TooDeepError(ValueError):
    """A value has lists and objects that are nested too deeply."""


class Decoder:
    """Decodes the records of one file, and caches the names in its rows."""

    def __init__(self, skipped: Collection[str] = ()) -> None:
        self.malformed: int = 0  # number of records that were skipped
        self.deep: int = 0
        self._skipped = skipped
        self._known: dict[bytes, str] = {}

    def decoded(self, record: bytes) -> Record | None:
        """Return a record; `None` if it is not of a wanted kind, or cannot be decoded."""
        try:
            number, content = 0, b""  # the last kind of a record that has several fields; parts of one are joined
            for field, start, begin, end in fields(record):
                if field not in ENVELOPE and record[start] & 7 == BYTES:
                    number, content = field, (content if field == number else b"") + record[begin:end]
            kind, schema = KINDS.get(number, ("", {}))
            if kind and kind not in self._skipped:
                return kind, self.row(content) if number == _HISTORY else _message(content, schema)
        except (MalformedError, ReadError):
            self.malformed += 1
        except TooDeepError:
            self.deep += 1
        return None

    def row(self, content: bytes) -> dict[str, Any]:
        names, values, end = list[str](), list[bytes](), 0
        with suppress(IndexError, KeyError, ValueError, RecursionError):  # usually all are numbers of known names
            while content[end : end + 1] == b"\n":
                begin, size = end + 2, content[end + 1]
                end = begin + size
                place = content.index(_VALUE_TAG, begin, end)
                names.append(self._known[content[begin:place]])
                values.append(content[place + 3 : end])
                if size > _LONGEST_PLAIN or not content[place + 2] == len(values[-1]) == end - place - 3:
                    raise ValueError("a long item")
            numbers = _PLAIN_JSON.decode(f"[{b','.join(values).decode()}]")
            is_plain = len(numbers) == len(names) and NUMBERS.issuperset(map(type, numbers))
            if is_plain and all(number != _ITEM for number, *_ in fields(content, end)):
                return {name: one if one % 1 else whole(one) for name, one in zip(names, numbers, strict=True)}
        found = _message(content, {_ITEM: ("item", lambda pieces: _items(pieces, self._known))})
        return _with_floats(found.get("item", {}))


def _items(pieces: Sequence[bytes], known: dict[bytes, str] | None = None) -> dict[str, Any]:
    # The items are sorted; there are none if one has no value. Those of rows have `known`, to which names are added.
    found: dict[str, Any] = {}
    for piece in pieces:
        keys, nested, value, before_value = b"", list[bytes](), b"", 0
        for number, start, first, last in fields(piece):
            if piece[start] & 7 != BYTES:
                continue
            if number == _KEY:
                keys = piece[first:last]
            elif number == _NESTED_KEY:
                nested.append(piece[first:last])
            elif number == _VALUE:
                value, before_value = piece[first:last], start
        name = _text(b".".join(nested or [keys]))
        if not value:
            return {}
        found[name] = _value(value)
        is_plain = before_value == sum(2 + len(key) for key in nested or [keys])  # nothing else precedes the value
        if known is not None and is_plain and len(known) < _MOST_NAMES:
            known.setdefault(piece[:before_value], name)
    return dict(sorted(found.items()))


def _with_floats(items: dict[str, Any]) -> dict[str, Any]:
    return {name: _NOT_FINITE.get(value, value) if type(value) is str else value for name, value in items.items()}


def _value(content: bytes) -> Any:
    """Decode a value in JSON, as JSON can print it. Another text is returned as it is."""
    text = _text(content)
    try:
        value = _JSON.decode(text)
        if "\\u" in text:  # half of a pair of surrogates cannot be printed
            value = _JSON.decode(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except RecursionError:
        raise TooDeepError from None
    except ValueError:
        return text
    if is_deeper(value):
        raise TooDeepError
    return value


def _number(text: str) -> float | str:
    """Return a number; as text if it is beyond any float."""
    number = float(text)
    if not math.isfinite(number):
        return json.dumps(number)
    return whole(int(text) if text.lstrip("-").isdigit() else number)


_JSON = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=str)


def whole(number: float) -> float:
    """Return a number as W&B's reader prints it: as an integer if it has no fraction and is below 1e21."""
    return number if number % 1 else int(number) if abs(number) < _FIRST_WITH_EXPONENT else float(number)


def _message(content: bytes, schema: _Schema) -> dict[str, Any]:
    """Decode the fields of a message that a schema names. The last one of several counts; parts of one are joined."""
    found: dict[str, Any] = {}
    pieces: dict[int, list[bytes]] = defaultdict(list)
    for number, start, begin, end in fields(content, most=_MOST_ITEMS):
        if number not in schema:
            continue
        name, decode = schema[number]
        if content[start] & 7 == BYTES and decode is not None:
            pieces[number].append(content[begin:end])
        elif content[start] & 7 == VARINT and decode is None:
            _, place = varint(content, start, len(content))
            value, _ = varint(content, place, len(content))
            found[name] = value - 2**64 if value >= 2**63 else value
    for number, parts in pieces.items():
        name, decode = schema[number]
        found[name] = decode(parts) if callable(decode) else _message(b"".join(parts), decode or {})
    return found


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise MalformedError("a text is not UTF-8") from None


def _texts(parts: Sequence[bytes]) -> list[str]:
    return list(map(_text, parts))


def _keys(parts: Sequence[bytes]) -> list[str | None]:
    return [_message(part, _named(key=_KEY)).get("key") for part in parts]


def _time(parts: Sequence[bytes]) -> str | None:
    """Return a time in ISO 8601, in UTC; `None` if it is beyond the years 1 to 9999."""
    found = _message(b"".join(parts), {1: ("seconds", None), 2: ("nanos", None)})
    try:
        moment = datetime.fromtimestamp(found.get("seconds", 0), timezone.utc)
        moment += timedelta(microseconds=found.get("nanos", 0) // 1000)
    except (ValueError, OverflowError, OSError):
        return None
    return f"{moment.replace(tzinfo=None).isoformat()}Z"


def _named(**numbers: int) -> _Schema:
    return {number: (name, lambda parts: _text(parts[-1]) or None) for name, number in numbers.items()}


_CONFIG: _Schema = {1: ("update", _items)}
_GIT = _named(commit=2)
KINDS: dict[int, tuple[str, _Schema]] = {
    _HISTORY: ("history", {}),
    3: ("summary", {1: ("update", lambda parts: _with_floats(_items(parts))), 2: ("remove", _keys)}),
    5: ("config", _CONFIG),
    7: ("stats", {2: ("timestamp", _time), 3: ("item", _items)}),
    12: ("metric", _named(name=1, glob_name=2, step_metric=4)),
    13: ("output_raw", _named(line=3)),
    17: (
        "run",
        {
            **_named(run_id=1, entity=2, project=3, run_group=6, job_type=7, display_name=8, notes=9, host=13),
            4: ("config", _CONFIG),
            10: ("tags", _texts),
            17: ("start_time", _time),
            21: ("git", _GIT),
            23: ("branch_point", _named(run=1)),
        },
    ),
    18: ("exit", {1: ("exit_code", None)}),
    26: (
        "environment",
        {
            **_named(python=2, program=6, code_path_local=8, host=12, gpu_type=18),
            5: ("args", _texts),
            9: ("git", _GIT),
            19: ("gpu_count", None),
        },
    ),
}
"""The kinds of records by number: name, and the fields that are read."""
