"""Files in run directories: W&B's record files and logs, sidecars, restart records; and what a report shows of them."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fuzzing import MIB, Target
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from offline_runs import sidecar_record
from PIL import Image
from record_files import BLOCK, HEADER, content_of, framed, new_record, of_json, serialised

from dist_wandb.cli import command, show, show_cards
from dist_wandb.cli.report import media, sections
from dist_wandb.cli.report.files import FileForReport
from dist_wandb.cli.report.page import json_of
from dist_wandb.cli.report.thinning import Budget
from dist_wandb.cli.uploads.contents import Terms, revised
from dist_wandb.cli.uploads.state import read_entries
from dist_wandb.errors import ReadError, UploadError
from dist_wandb.session.restart import RestartRecord
from dist_wandb.wandb_files import debug_log, reading, records
from dist_wandb.wandb_files.record_file import (
    MalformedError,
    RecordFile,
    copy_without,
    field_of,
    fields,
)
from dist_wandb.wandb_files.runs import brought_together
from dist_wandb.wandb_files.sidecar import Sidecar
from dist_wandb.wandb_files.small_files import Directory, parse_json

_RUN_FILE = Path("/nowhere/offline-run-1-exp/run-exp.wandb")

# Tags of fields and numbers in protobuf's encoding: valid ones, some of 10 bytes and more, groups, invalid types.
_PROTOBUF = (
    *(bytes([number << 3 | kind]) for number in (1, 2, 3, 7, 13) for kind in (0, 1, 2, 3, 4, 5, 6)),
    *(b"\x6a", b"\x8a\x01", b"\xff" * 9 + b"\x01", b"\xff" * 10 + b"\x01", b"\x80\x80\x04", b"\x80" * 40),
    *(struct.pack("<IHB", 0, length, kind) for length in (0, 1, 9, 65_535) for kind in (0, 1, 2, 3, 4, 9)),
)


# Replacements for a JSON value.
_ODD = (
    *b'"3" null true false 1e400 -1e400 NaN -1 0 1 2.0 1.5 404 499 [] {} [[]] {"a":{}} ["a"] ""'.split(),
    *(b'"\\u0000"', b'"\\ud800"', b'"\\u001b[2J"', b'"teapot"', b"[" * 70 + b"]" * 70, b"[" * 2000 + b"]" * 2000),
    *(b"9007199254740992", b"9007199254740993", b"10000000000", b"9" * 400, b"9" * 5000),
    *(b'"' + b"x" * 2000 + b'"', b'"' + b"a." * 400 + b'_type"'),
)
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null')


def _with_odd_values(seeds: Callable[[], Sequence[bytes]]) -> Callable[[bytes], bytes]:
    """Makes JSON from any bytes: that of a seed, with some values or names replaced."""
    whole = [seed for seed in seeds() if seed]

    def made(data: bytes) -> bytes:
        chance = random.Random(data)
        text = chance.choice(whole)
        for _ in range(chance.randint(1, 4)):
            found = chance.choice(list(_VALUE.finditer(text)))
            text = text[: found.start()] + chance.choice(_ODD) + text[found.end() :]
        return text

    return made


# --- record files -----------------------------------------------------------------------------------------------------


def _messages() -> list[Any]:
    return [of_json(json.loads(line)) for line in inspections()[0].splitlines()]


def _record_files() -> list[bytes]:
    messages, long = _messages(), new_record()
    long.output_raw.line = "x" * BLOCK
    return [content_of([]), content_of(messages), content_of([long, *messages]), content_of(messages[1:] * 6)]


def _read_records(data: bytes) -> None:
    copy = _copy_of(data)
    assert _copy_of(copy) == copy  # the rest is valid
    assert len(_copy_of(data, history=2, events=1, console=3)) <= len(copy)


def _copy_of(data: bytes, **first: int) -> bytes:
    copy = io.BytesIO()
    copy_without(io.BytesIO(data), copy, None, **first)
    return copy.getvalue()


def _with_checksums(data: bytes) -> bytes:
    """Return a record file whose chunks have maximum lengths, a valid kind, and correct checksums."""
    content = bytearray(HEADER + data[len(HEADER) :])
    place = len(HEADER)
    while place + 7 <= len(content):
        left = BLOCK - place % BLOCK
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        kind = kind if 1 <= kind <= 4 else 1 + kind % 4
        length = min(length, left - 7, len(content) - place - 7)
        chunk = bytes(content[place + 7 : place + 7 + length])
        struct.pack_into("<IHB", content, place, zlib.crc32(bytes([kind]) + chunk), length, kind)
        place += 7 + length
    return bytes(content)


def _read_fields(data: bytes) -> None:
    found = fields(data)
    ends = [0, *(end for *_, end in found)]
    assert list(accumulate(ends, max)) == ends  # one after the other, within the message
    assert ends[-1] <= len(data)


# --- history rows -----------------------------------------------------------------------------------------------------


def _history_rows() -> list[bytes]:
    made = []
    for values in (
        {"loss": "0.5", "_step": "1", "_timestamp": "1.7e+09", "nan": "NaN"},
        {
            "text": '"a"',
            "list": "[1,[2]]",
            "map": '{"a":{"b":null}}',
            "no": "no JSON",
            "empty": "",
            "half": '"\\ud800"',
        },
        {"x" * 130: "1", "あ": "1", "many": "9" * 60},
    ):
        row = new_record().history
        for name, value in values.items():
            item = row.item.add()
            item.nested_key.extend(name.split("_"))
            item.value_json = value
        row.step.num = 3
        made.append(row.SerializeToString())
    return [b"", *made]


def _with_some_items(data: bytes) -> bytes:
    """A row of items with unusual names and values, some written in another order, some with a wrong byte."""
    chance = random.Random(data)
    row = b""
    for _ in range(chance.randint(1, 8)):
        names = [
            chance.choice((b"a", b"b", b"a.b", b"", b"x" * 130, b"\xe3\x81\x82", b"\n\x12", data[:9])) for _ in "ab"
        ]
        parts = [field_of(2, name) for name in names[: chance.choice((1, 1, 1, 2))]]
        parts.append(field_of(16, chance.choice((*_ODD, b"1.5", b"-3", b"1e+09", data[9:30]))))
        if chance.random() < 0.1:
            parts.append(field_of(1, names[0]))
            chance.shuffle(parts)
        row += field_of(1, b"".join(parts))
    row += b"\x12\x02\x08\x03" if chance.random() < 0.5 else b""
    if chance.random() < 0.3:
        at = chance.randrange(len(row))
        row = row[:at] + bytes([chance.randrange(256)]) + row[at + 1 :]
    return row


def _read_row(data: bytes) -> None:
    """Names equal those of protobuf, if each item has a value. Rows are the same with and without known names."""
    decoder = records.Decoder()
    row, again = decoder.row(data), decoder.row(data)
    assert sorted(row) == sorted(again)
    assert repr(list(map(row.get, sorted(row)))) == repr(list(map(again.get, sorted(row))))
    json.dumps(row).encode()
    repr(row).encode()
    with suppress(DecodeError):  # in fields that rows do not have
        read = type(new_record().history).FromString(data)
        expected = {".".join(item.nested_key) if item.nested_key else item.key for item in read.item}
        assert row.keys() == (expected if all(item.value_json for item in read.item) else set())


# --- what an upload takes of a record ---------------------------------------------------------------------------------


_RUN = Directory(Path("/nowhere/run"), 0, 0)
_TERMS = Terms(staging=Path("/nowhere/staging"), owners=frozenset({"me"}), default="me")
_HARMLESS = {
    "owner": ("", "me"),
    "place": ("", "/nowhere/run/files/a"),
    "name": ("a.txt", "media/b.png"),
    "list": ("",),
}
_HOSTILE = {
    "owner": ("stranger",),
    "place": ("/nowhere/staging/b", "/etc/passwd", "/nowhere/run/../../etc/passwd", "a"),
    "name": ("../c", "/etc/passwd", "d/../../e"),
    "list": ("/etc/passwd",),
}


def _uploaded_record(chance: random.Random) -> bytes:
    """A record from an untrusted writer: any kinds, owners and files, in parts that are joined."""

    def any_of(what: str) -> str:
        return chance.choice((_HOSTILE if chance.random() < 0.1 else _HARMLESS)[what])

    written = b""
    for _ in range(chance.randint(1, 3)):
        message = new_record()
        kind = chance.choices(("run", "files", "artifact", "history", "request", "tbrecord"), (5, 3, 9, 2, 1, 1))[0]
        if kind == "run":
            message.run.entity = any_of("owner")
        elif kind == "files":
            message.files.files.add().path = any_of("name")
        elif kind == "artifact":
            message.artifact.entity = any_of("owner")
            for _ in range(chance.randint(0, 3)):
                message.artifact.manifest.contents.add().local_path = any_of("place")
            message.artifact.manifest.manifest_file_path = any_of("list")
        else:
            getattr(message, kind).SetInParent()
        written += message.SerializeToString()
    if chance.random() < 0.3:  # the same number, encoded with more bytes than needed
        at = chance.randrange(len(written) + 1)
        written = written[:at] + bytes([written[at] | 0x80, 0]) + written[at + 1 :] if at < len(written) else written
    return written


def _uploaded_records() -> list[bytes]:
    run, files, artifact = (new_record() for _ in range(3))
    run.run.entity, run.run.run_id = "me", "exp"
    files.files.files.add().path = "media/a.png"
    artifact.artifact.entity, artifact.artifact.name = "me", "model"
    entry = artifact.artifact.manifest.contents.add()
    entry.path, entry.digest, entry.local_path = "a", "CY9rzUYh03PK3k6DJie09g==", "/nowhere/run/files/a"
    return [message.SerializeToString() for message in (run, files, artifact, *_messages())]


def _read_uploaded(data: bytes) -> None:
    """Accepted records are harmless as protobuf reads them: it may merge parts, and uses the last of several."""
    taken = revised(data, fields(data), _RUN, _TERMS, lambda *_: Path("/private/copy"))
    try:
        record = type(new_record()).FromString(taken)
    except DecodeError:  # W&B's uploader cannot read it, either
        return
    kind = record.WhichOneof("record_type")
    assert kind not in ("request", "tbrecord")
    assert record.run.entity in ("", "me")
    assert record.artifact.entity in ("", "me")
    assert record.artifact.manifest.manifest_file_path == ""
    assert {entry.local_path for entry in record.artifact.manifest.contents} <= {"", "/private/copy"}
    assert not any(item.path.startswith("/") or ".." in item.path.split("/") for item in record.files.files)


# --- logs -------------------------------------------------------------------------------------------------------------


def _lines_of(*entries: object) -> bytes:
    return b"".join(json.dumps(entry, separators=(",", ":")).encode() + b"\n" for entry in entries)


def _logs() -> list[bytes]:
    url = "http://server/files/team/digits/exp/file_stream"
    sending: dict[str, Any] = {"level": "INFO", "msg": "filestream: sending request", "history_lines": 5}
    sending |= {"events_lines": 2, "console_offset": 3, "console_lines": 4, "complete": True}
    sent = {"level": "INFO", "msg": "filestream: request sent", "status": "200 OK"}
    retrying = {"level": "INFO", "msg": "api: retrying HTTP error", "status": 429, "url": url}
    refused = {"level": "ERROR", "msg": "api: HTTP error", "status": 404, "method": "POST", "url": url}
    broken = {"level": "INFO", "msg": "api: retrying error", "error": f'Post "{url}": dial tcp 1.2.3.4:443: EOF'}
    reason = "filestream: fatal error: giving up: context canceled\nwhile retrying: HTTP 500: x. got response: <nil>"
    fatal = {"level": "ERROR+4", "msg": reason}
    unwritten = {"level": "ERROR", "msg": "writer: failed to flush: no space", "error": "x"}
    closed = {"level": "INFO", "msg": "sender: closed"}
    return [
        b"",
        _lines_of(sending, sent, sending, retrying, sent, closed),
        _lines_of(sending, retrying, broken, fatal, closed),
        _lines_of(sending, refused, fatal, unwritten, closed),
    ]


def _read_log(data: bytes) -> None:
    sent = read_entries(io.BytesIO(data))
    counts = (sent.history, sent.events, sent.console, sent.unsure)
    assert all(type(count) is int and count >= 0 for count in counts)
    assert all(isinstance(problem, str) and len(problem) <= 2000 for problem in sent.problems)
    assert len(sent.problems) <= 100
    with TemporaryDirectory() as directory:
        path = debug_log.log_of(Path(directory))
        path.parent.mkdir()
        path.write_bytes(data)
        for what, why in [*debug_log.untaken(path).items(), *debug_log.unwritten(path, 0.0).items()]:
            assert what in ("rows and console lines", "name, config and the like", "files", "artifacts", "rows")
            assert len(why) <= 2000


# --- sidecars and notes -----------------------------------------------------------------------------------------------


def _sidecars() -> list[bytes]:
    nothing = dict.fromkeys(("run_id", "base_id", "label", "group", "local_rank", "node_rank", "num_nodes"))
    whole = sidecar_record(group="a")
    return [json.dumps(whole).encode(), json.dumps(whole | nothing).encode()]


def _read_sidecar(data: bytes) -> None:
    sidecar = Sidecar.from_json(parse_json(data))
    assert 0 <= sidecar.global_rank < sidecar.world_size <= 1_000_000
    assert sidecar.label is None or sidecar.label.isprintable()
    assert "\0" not in "".join(value for value in asdict(sidecar).values() if isinstance(value, str))


def _notes() -> list[bytes]:
    note: dict[str, Any] = {"base_id": "exp", "session": "init/1", "project": "digits", "entity": None}
    note |= {"run_mode": "auto", "rank_scope": "global", "world_size": 2, "job": "slurm-7", "requeues": 1}
    note["rendezvous"] = "host:1/0"
    return [json.dumps(asdict(RestartRecord(**note))).encode()]


def _read_note(data: bytes) -> None:
    note = RestartRecord.of(parse_json(data))
    assert RestartRecord.of(parse_json(json.dumps(asdict(note)))) == note
    assert note.base_id.isprintable()


# --- whole files ------------------------------------------------------------------------------------------------------


def file_of(lines: bytes) -> bytes:
    """Return a record file of records in JSON, without those that protobuf cannot hold."""
    made = []
    for line in lines.splitlines():
        with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, SystemError):  # of protobuf
            made.append(of_json(json.loads(line)))
    return framed(serialised(made))


def decoded(data: bytes) -> Iterator[records.Record]:
    decoder = records.Decoder()
    yield from filter(None, map(decoder.decoded, RecordFile(io.BytesIO(data), 2**20).records()))


def inspections() -> list[bytes]:
    about = {"run_id": "exp", "display_name": "night", "project": "digits", "run_group": "g", "job_type": "t"}
    config = {"lr": 0.1, "net": {"layers": [1, 2]}, "_wandb": {}}
    picture = {"image._type": "image-file", "image.path": "media/images/a.png", "image.width": 28, "image.size": 3}
    table = {"table._type": "table-file", "table.path": "media/table/a.table.json", "table.ncols": 2}
    spread = {"time/step": 1.0, "time/step/min": 0.5, "time/step/max": 2.0, "time/step/argmax_rank": 3}
    row = {"_step": 1, "global_step": 10, "loss": "NaN", **spread, "rank-1/loss": 2, "dist_wandb/degraded": 1}
    straggler = {"time/straggler_rank": 1, "time/straggler_excess": 0.1, "global_step": 11, "rank-0/loss": 1}
    others = {"val.acc": 0.5, "text": "a", "list": [1, [2]], "image_count": 3, "x": 10**20}
    time = "2026-01-01T00:00:00Z"
    contents: Iterable[tuple[str, dict[str, Any]]] = (
        ("header", {}),
        ("run", {**about, "tags": ["x"], "start_time": time, "config": {"update": config}}),
        ("config", {"update": {"lr": 0.2, "late": [None, True, "x"]}}),
        ("environment", {"host": "node", "gpu_count": 8, "program": "a.py", "args": ["--token", "x"], "git": {}}),
        ("metric", {"glob_name": "*", "step_metric": "global_step"}),
        ("metric", {"name": "val/acc", "step_metric": "epoch"}),
        ("history", {"item": row}),
        ("history", {"item": {**straggler, **table, **picture, **others}}),
        ("stats", {"item": {"system.gpu.0.temp": 50, "system.cpu/l:rank-1": 1.5}, "timestamp": time}),
        ("stats", {"item": {"system.gpu.1.temp": 51}, "timestamp": "2026-01-01T00:00:10.123456789+02:00"}),
        ("output_raw", {"line": "10 %\r20 %\x1b[2J\nlast", "output_type": "STDOUT"}),
        ("summary", {"update": {"loss": 1}}),
        ("exit", {"exit_code": 1}),
    )
    lines = [{"num": number, "type": kind, kind: content} for number, (kind, content) in enumerate(contents, 1)]
    return [_lines_of(*lines), _lines_of(*lines[:7]), _lines_of(*lines[:3], *lines[5:10] * 10)]


def _read_inspection(data: bytes) -> None:
    run = reading.StoredRun(_RUN_FILE, Directory(_RUN_FILE.parent, 0, 0))
    for record in decoded(data):
        run.add(record)
    run.end()
    assert run.rows >= 0
    assert all(0 <= metric.not_finite <= metric.count <= run.rows for metric in run.metrics.values())
    (joined,) = brought_together([run, run])
    with redirect_stdout(io.StringIO()):
        command.print_json(show.run_as_json(joined, ["*"]))
    show_cards.card(joined, ["*"], 80)
    show.runs_table([[joined]], None, 80)


# --- what a report shows ----------------------------------------------------------------------------------------------


def _read_report(data: bytes) -> None:
    file = FileForReport(_RUN_FILE, Directory(_RUN_FILE.parent, 0, 0), Budget(1000))
    for record in decoded(data):
        file.add(record)
    file.end()
    runs = sections([file], media.MediaReader(1000))
    text = json_of({"runs": runs})
    assert not set("<>&") & set(text)
    (run,) = json.loads(text)["runs"]
    for chart in run["charts"] + run["system"]:
        for line in (chart["line"], *chart["ranks"].values()):
            assert line is None or len(line["x"]) == len(line["y"])
            assert line is None or line["x"] == sorted(line["x"])


def _pictures() -> list[bytes]:
    made = []
    for kind in ("PNG", "JPEG"):
        content = io.BytesIO()
        Image.new("RGB", (5, 4), (1, 2, 3)).save(content, kind)
        made.append(content.getvalue())
    return [b"", *made]


def _read_picture(data: bytes) -> None:
    found = media.checked(data)
    if found is not None:
        kind, width, height = found
        assert kind in ("image/png", "image/jpeg")
        assert 0 < width * height <= 64 * 2**20


def _tables() -> list[bytes]:
    cells = [[1, "a", None], [2.5, {"_type": "image-file"}, [1, 2]]]
    return [
        json.dumps({"columns": ["x", 1, "z"], "data": cells}).encode(),
        b'{"columns": ["a"], "data": [[1], [2], [], ["x", 3]]}',
    ]


def _read_table(data: bytes) -> None:
    found = media.table_of("a", 0, parse_json(data))
    assert len(found["rows"]) <= min(100, found["total"])
    assert all(isinstance(cell, str) and len(cell) <= 300 for row in (found["columns"], *found["rows"]) for cell in row)


TARGETS = (
    Target("records", _read_records, _record_files, (ReadError,), _PROTOBUF, _with_checksums),
    Target(
        "fields",
        _read_fields,
        lambda: [message.SerializeToString() for message in _messages()],
        (ReadError, MalformedError),
        _PROTOBUF,
    ),
    Target(
        "row",
        _read_row,
        _history_rows,
        (ReadError, MalformedError, records.TooDeepError),
        (*_PROTOBUF, b"\x82\x01", b"\n\x09\x12\x01a\x82\x01\x031.5"),
        _with_some_items,
        slack=24 * MIB,  # for many short items in memory, at most 100,000
    ),
    Target(
        "uploaded",
        _read_uploaded,
        _uploaded_records,
        (UploadError, ReadError, MalformedError),
        _PROTOBUF,
        lambda data: _uploaded_record(random.Random(data)),
    ),
    Target("log", _read_log, _logs, (), _ODD, _with_odd_values(_logs)),
    Target("sidecar", _read_sidecar, _sidecars, (ValueError,), _ODD, _with_odd_values(_sidecars)),
    Target("note", _read_note, _notes, (ValueError,), _ODD, _with_odd_values(_notes)),
    Target(
        "inspection",
        _read_inspection,
        lambda: list(map(file_of, inspections())),
        (ReadError,),
        _ODD,
        lambda data: file_of(_with_odd_values(inspections)(data)),
        examples=300,  # each takes ten times as long as one of another target
    ),
    Target(
        "report",
        _read_report,
        lambda: list(map(file_of, inspections())),
        (ReadError,),
        _ODD,
        lambda data: file_of(_with_odd_values(inspections)(data)),
        300,
    ),
    Target("picture", _read_picture, _pictures, (), (b"IHDR", b"IDAT", b"IEND", b"\xff\xd8", b"\xff\xd9", b"\xff\xda")),
    Target("logged-table", _read_table, _tables, (ValueError,), _ODD, _with_odd_values(_tables)),
)
