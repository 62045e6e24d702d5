"""The log of wandb's own process: its entries, and what it tells of a run that the server, or the disk, did not take.

wandb says it in a line among others, without the run, the reason or what to do. The log is the only place that has the
reason: lines of JSON. If a later wandb writes something else there, nothing is found, and wandb's own line remains.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_NOT_SENT = {
    "filestream: fatal error": "rows and console lines",
    "runupserter: failed": "name, config and the like",
    "runfiles:": "files",
    "file transfer: upload: failed": "files",
    "sender: failed to log artifact": "artifacts",  # of which wandb itself says nothing at all
}
_NOT_WRITTEN = {"writer: failed": "rows"}
_FULL = 2**20  # bytes that are left on a disk that is as good as full


def log_of(run_directory: Path) -> Path:
    """Where wandb's own process logs what it does for a run."""
    return run_directory / "logs" / "debug-internal.log"


def entries(log: Iterable[bytes], containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """The entries of such a log; a line that was cut off, as its writer was killed, is passed over.

    Args:
        log: Its lines.
        containing: What a line must have in it to be looked at.
    """
    for line in log:
        if containing in line:
            with suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry


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
    with suppress(OSError), log.open("rb") as lines:
        return _reasons(entries(lines, b'"level":"ERROR'), known)
    return {}


def _reasons(errors: Iterable[Mapping[str, Any]], known: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in errors:
        message = str(entry.get("msg", ""))
        for start, what in known.items():
            if message.startswith(start):
                reason = str(entry.get("error", "")) or message.removeprefix(start).lstrip(": ")
                found.setdefault(what, _essence(reason))
    return found


def _essence(reason: str) -> str:
    """The last cause, in one line: what was being retried when the time was over, rather than that it was over."""
    *_, cause = reason.split("while retrying: ")
    return " ".join(cause.removeprefix("filestream: ").removesuffix(". got response: <nil>").split())
