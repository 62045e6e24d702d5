"""The log of wandb's own process: its entries, and what it tells of a run that the server, or the disk, did not take.

wandb says it in a line among others, without the run, the reason or what to do. The log is the only place that has the
reason: lines of JSON. If a later wandb writes something else there, nothing is found, and wandb's own line remains.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dist_wandb.errors import ReadError
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER
from dist_wandb.wandb_files.small_files import open_ordinary, parse_json

_NOT_SENT = {
    "filestream: fatal error": "rows and console lines",
    "runupserter: failed": "name, config and the like",
    "runfiles:": "files",
    "file transfer: upload: failed": "files",
    "sender: failed to log artifact": "artifacts",  # of which wandb itself says nothing at all
}
_NOT_WRITTEN = {"writer: failed": "rows"}
_FULL = 2**20  # bytes that are left on a disk that is as good as full
_LONGEST_LINE = 2**20
_LONGEST_REASON = 2000  # characters

LONGEST_LOG = 2**30
"""Bytes that are read of a log at most; a file without an end may be sparse, and cost nobody anything to make."""


def log_of(run_directory: Path) -> Path:
    """Where wandb's own process logs what it does for a run."""
    return run_directory / "logs" / "debug-internal.log"


def entries(log: BinaryIO, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The entries of such a log; lines that are none are passed over, as those cut off when their writer was killed.

    Args:
        log: Where it is read.
        containing: What a line must have in it to be looked at.

    Raises:
        ReadError: The log is longer than `LONGEST_LOG`.
    """
    for line in _lines(log):
        if containing in line:
            with suppress(ValueError):
                entry = parse_json(line)
                if isinstance(entry, dict):
                    yield entry


def text_in(entry: Mapping[str, Any], name: str, default: str = "") -> str:
    """A text of an entry; `default` where it has none of that name, or something else."""
    value = entry.get(name)
    return value if isinstance(value, str) else default


def count_in(entry: Mapping[str, Any], name: str) -> int:
    """A whole number of an entry, from 0 to 2^53; 0 where it has none of that name, or something else."""
    value = entry.get(name)
    return value if type(value) is int and 0 <= value <= LARGEST_EXACT_INTEGER else 0


def open_log(path: Path) -> BinaryIO:
    """Open a log.

    Raises:
        FileNotFoundError: There is none.
        ReadError: What lies there is no ordinary file.
        OSError: It cannot be opened.
    """
    return os.fdopen(open_ordinary(path), "rb")


def _lines(log: BinaryIO) -> Iterator[bytes]:
    """The lines of a log, but for those that are longer than any entry; one that has no end yet is among them."""
    read, is_too_long = 0, False
    while piece := log.readline(_LONGEST_LINE):
        read += len(piece)
        if read > LONGEST_LOG:
            raise ReadError(f"is longer than {LONGEST_LOG} bytes, so it is not read.")
        has_end = piece.endswith(b"\n")
        if not is_too_long and (has_end or len(piece) < _LONGEST_LINE):
            yield piece
        is_too_long = not has_end


def untaken(log: Path) -> dict[str, str]:
    """Find out what the server was not given.

    Args:
        log: ``debug-internal.log`` of a run that has ended.

    Returns:
        What did not reach the server, and why; empty if nothing of the kind is known.
    """
    return _given_up(log, _NOT_SENT)


def unwritten(log: Path) -> dict[str, str]:
    """Find out what is not on disk. On a full disk the log may not have it either, so that is looked at too.

    Args:
        log: ``debug-internal.log`` of a run that has ended.

    Returns:
        What could not be written, and why; empty if nothing of the kind is known.
    """
    found = _given_up(log, _NOT_WRITTEN)
    with suppress(OSError):
        if not found and shutil.disk_usage(log.parent).free < _FULL:
            found["rows"] = f"the disk of {log.parent} is full"
    return found


def _given_up(log: Path, known: Mapping[str, str]) -> dict[str, str]:
    with suppress(OSError, ReadError), open_log(log) as opened:
        return _reasons(entries(opened, b'"level":"ERROR'), known)
    return {}


def _reasons(errors: Iterable[Mapping[str, Any]], known: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in errors:
        message = text_in(entry, "msg")
        for start, what in known.items():
            if message.startswith(start):
                reason = text_in(entry, "error") or message.removeprefix(start).lstrip(": ")
                found.setdefault(what, _essence(reason))
    return found


def _essence(reason: str) -> str:
    """The last cause, in one line: what was being retried when the time was over, rather than that it was over."""
    *_, cause = reason.split("while retrying: ")
    return " ".join(cause.removeprefix("filestream: ").removesuffix(". got response: <nil>").split())[:_LONGEST_REASON]
