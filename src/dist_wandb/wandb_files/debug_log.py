"""Read the log of wandb's own process: its entries, and the data that the server or the disk did not accept.

wandb prints one line about lost data, without the run or the reason. Only the log, in lines of JSON, contains the
reason. If a later wandb writes another format, nothing is found, and wandb's own line remains.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dist_wandb.errors import ReadError
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER
from dist_wandb.wandb_files.record_file import has_end
from dist_wandb.wandb_files.small_files import open_ordinary, parse_json, time_limit

_NOT_SENT = {
    "filestream: fatal error": "rows and console lines",
    "runupserter: failed": "name, config and the like",
    "runfiles:": "files",
    "file transfer: upload: failed": "files",
    "sender: failed to log artifact": "artifacts",  # wandb itself prints nothing about these
}
_NOT_WRITTEN = {"writer: failed": "rows"}
_LAST_WRITES = 5.0  # seconds in which wandb's own process writes the end of a file, which takes some milliseconds
_PAUSE = 0.02  # seconds between two checks of that
_FULL = 2**20  # bytes; with less free space a disk counts as full
_LONGEST_LINE = 2**20
_LONGEST_REASON = 2000  # characters
LONGEST_LOG = 2**30  # bytes: an attacker can create a sparse file of any size at no cost
MOST_LINES = 1_000_000  # of a log: W&B writes about ten in a minute
_LONGEST_TIME = 10.0  # seconds of processor time


def log_of(run_directory: Path) -> Path:
    return run_directory / "logs" / "debug-internal.log"


def entries(log: BinaryIO, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    # The last line may be incomplete. Lines longer than any entry are skipped.
    read, lines, is_too_long, check_time = 0, 0, False, time_limit(_LONGEST_TIME)
    while piece := log.readline(_LONGEST_LINE):
        read += len(piece)
        if read > LONGEST_LOG:
            raise ReadError(f"is longer than {LONGEST_LOG} bytes, so it is not read.")
        if lines == MOST_LINES:
            raise ReadError(f"has more than {MOST_LINES} lines, so it is not read to its end.")
        lines += 1
        check_time()
        has_end = piece.endswith(b"\n")
        is_whole = not is_too_long and (has_end or len(piece) < _LONGEST_LINE)
        is_too_long = not has_end
        if is_whole and piece[:1] == b"{" and containing in piece:
            with suppress(ValueError):
                entry = parse_json(piece)
                if isinstance(entry, dict):
                    yield entry


def text_in(entry: Mapping[str, Any], name: str, default: str = "") -> str:
    value = entry.get(name)
    return value if isinstance(value, str) else default


def count_in(entry: Mapping[str, Any], name: str) -> int:
    """Return an integer of an entry, from 0 to 2^53; 0 if it is missing or has another value."""
    value = entry.get(name)
    return value if type(value) is int and 0 <= value <= LARGEST_EXACT_INTEGER else 0


def untaken(log: Path) -> dict[str, str]:
    """Return why the server did not accept data of an ended run, by kind of data; empty if nothing is known."""
    return _failures(log, _NOT_SENT)


def unwritten(log: Path, within: float = _LAST_WRITES) -> dict[str, str]:
    """As `untaken`, for data that was not written to disk; waits some seconds for the end of the run's file."""
    files, until = [*log.parent.parent.glob("*.wandb")], time.monotonic() + within
    found = _failures(log, _NOT_WRITTEN)
    with suppress(OSError):  # on a full disk the log may be incomplete
        if not found and shutil.disk_usage(log.parent).free < _FULL:
            found["rows"] = f"the disk of {log.parent} is full"
    with suppress(OSError, ReadError):
        while not found and not all(map(has_end, files)):
            time.sleep(_PAUSE)
            found = _failures(log, _NOT_WRITTEN)
            if not found and time.monotonic() > until:
                found["rows"] = f"after {within:g} s, the file in {files[0].parent} lacks the run's end"
    return found


def _failures(log: Path, kinds: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(OSError, ReadError), os.fdopen(open_ordinary(log), "rb") as opened:
        for entry in entries(opened, b'"level":"ERROR'):
            message = text_in(entry, "msg")
            for start in filter(message.startswith, kinds):
                reason = text_in(entry, "error") or message.removeprefix(start).lstrip(": ")
                *_, cause = reason.split("while retrying: ")  # the error that was retried, not the retries' time-out
                cause = cause.removeprefix("filestream: ").removesuffix(". got response: <nil>")
                found.setdefault(kinds[start], " ".join(cause.split())[:_LONGEST_REASON])
    return found
