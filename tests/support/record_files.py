"""Write W&B's record files (``.wandb``): sound files, and files that wandb itself never writes.

A file consists of seven bytes and a log in blocks of 32 KiB, in LevelDB's format: a record is one chunk or more, and
each chunk has a checksum. A hostile file has hostile records, so all checksums here are valid.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from wandb.proto import wandb_internal_pb2

pb: Any = wandb_internal_pb2  # its classes are created at import
Record: TypeAlias = Any
HEADER = b":W&B\xe1\xbe\x00"
BLOCK = 32_768
LONG_AGO = 1e9  # seconds since the epoch: the file is no longer being written
_STARTED = 1_700_000_000
_CHUNK_HEADER = struct.Struct("<IHB")
_KINDS = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}  # by is_first, is_last


def framed(records: Iterable[bytes]) -> bytes:
    content = bytearray(HEADER)
    for record in records:
        begin, is_first = 0, True
        while True:
            left = BLOCK - len(content) % BLOCK
            if left < _CHUNK_HEADER.size:
                content += bytes(left)
                continue
            chunk = record[begin : begin + left - _CHUNK_HEADER.size]
            begin += len(chunk)
            kind = _KINDS[is_first, begin == len(record)]
            content += _CHUNK_HEADER.pack(zlib.crc32(bytes([kind]) + chunk), len(chunk), kind) + chunk
            is_first = False
            if begin == len(record):
                break
    return bytes(content)


def varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def content_of(records: Iterable[Record]) -> bytes:
    """Return a record file of messages, which are numbered."""
    return framed(serialised(records))


def serialised(records: Iterable[Record | bytes]) -> list[bytes]:
    """Number records from 1 as wandb does, and serialise them; bytes are kept as they are."""
    made = []
    for number, record in enumerate(records, start=1):
        if isinstance(record, bytes):
            made.append(record)
        else:
            record.num = number
            made.append(record.SerializeToString())
    return made


def new_record() -> Record:
    return pb.Record()


def header() -> Record:
    record = pb.Record()
    record.header.version_info.producer = "0.31.0"
    record.header.version_info.min_consumer = "0.0.1"
    return record


def run(run_id: str = "exp", *, config: Mapping[str, Any] | None = None, **texts: str) -> Record:
    """Return the run record; `texts` are fields of it, such as ``entity`` and ``display_name``."""
    record = pb.Record()
    record.run.run_id = run_id
    record.run.project = "tests"
    record.run.start_time.FromSeconds(_STARTED)
    for name, text in texts.items():
        setattr(record.run, name, text)
    for name, value in (config or {}).items():
        update = record.run.config.update.add()
        update.key, update.value_json = name, json.dumps(value)
    return record


def row(step: int, values: Mapping[str, Any] | None = None) -> Record:
    """Return a history row; values of type bytes are used as JSON without encoding."""
    record = pb.Record()
    for name, value in {"loss": 1.0 / (step + 1), "global_step": step, **(values or {}), "_step": step}.items():
        item = record.history.item.add()
        item.nested_key.append(name)
        item.value_json = value.decode() if isinstance(value, bytes) else json.dumps(value)
    return record


def definition(pattern: str = "*", axis: str = "global_step") -> Record:
    record = pb.Record()
    record.metric.glob_name, record.metric.step_metric = pattern, axis
    return record


def end(exit_code: int = 0) -> Record:
    record = pb.Record()
    record.exit.exit_code = exit_code
    return record


def of_json(record: Mapping[str, Any]) -> Record:
    """Return the record that is read as this: values of configs, rows and the like by name."""
    made, kind = pb.Record(), record["type"]
    contents: dict[str, Any] = record[kind]
    target = getattr(made, kind)
    target.SetInParent()
    for name, value in contents.items():
        field = target
        if name == "config":
            field, name, value = target.config, "update", value["update"]  # noqa: PLW2901
        if isinstance(value, dict):
            for key, inner in value.items():
                getattr(field, name).add(
                    key=key, value_json=inner.decode() if isinstance(inner, bytes) else json.dumps(inner)
                )
        elif name in ("start_time", "timestamp"):
            getattr(field, name).FromJsonString(value)
        elif isinstance(value, list):
            getattr(field, name).extend(value)
        else:
            setattr(field, name, value)
    return made


def rows(count: int = 3) -> list[Record]:
    return [row(step) for step in range(count)]


def write_run(
    top: Path,
    run_id: str = "exp",
    *,
    extra: Iterable[Record | bytes] = (),
    records: Iterable[Record | bytes] | None = None,
    ended: bool = True,
    online: bool = False,
    stamp: str = "20260101_000000",
    **described: Any,
) -> Path:
    """Write a run's directory as wandb lays it out; `records` replace those of a sound run.

    `described` are fields of the run record, and `extra` follows its history.
    """
    directory = top / "wandb" / f"{'run' if online else 'offline-run'}-{stamp}-{run_id}"
    (directory / "files").mkdir(parents=True)
    if records is None:
        records = [header(), run(run_id, **described), *rows(), *extra, *([end()] if ended else [])]
    path = directory / f"run-{run_id}.wandb"
    path.write_bytes(framed(serialised(records)))
    os.utime(path, (LONG_AGO, LONG_AGO))
    return directory


def make_run(top: Path, run_id: str = "exp", *, rows: int = 3) -> Path:
    """Write a sound run with a number of rows as `write_run` does; return its ``.wandb`` file."""
    records = [header(), run(run_id, project="digits"), *(row(step) for step in range(rows)), end()]
    return write_run(top, run_id, records=records) / f"run-{run_id}.wandb"
