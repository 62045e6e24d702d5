"""What W&B's server did not take of a run, as the log of wandb's own process tells it.

wandb says it in a line among others, without the run, the reason or what to do. The log is the only place that has the
reason: lines of JSON. If a later wandb writes something else there, nothing is found, and wandb's own line remains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_WHAT = {
    "filestream: fatal error": "rows and console lines",
    "runupserter: failed": "name, config and the like",
    "runfiles:": "files",
}


def untaken(log: Path) -> dict[str, str]:
    """Find out what was given up.

    Args:
        log: ``debug-internal.log`` of a run that has ended.

    Returns:
        What did not reach the server, and why; empty if nothing of the kind is known.
    """
    found: dict[str, str] = {}
    for entry in _errors(log):
        message = str(entry.get("msg", ""))
        for start, what in _WHAT.items():
            if message.startswith(start):
                reason = str(entry.get("error", "")) or message.removeprefix(start).lstrip(": ")
                found.setdefault(what, _essence(reason))
    return found


def _errors(log: Path) -> Iterator[dict[str, object]]:
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"level":"ERROR' in line:
                    entry = json.loads(line)
                    if isinstance(entry, dict):
                        yield entry
    except (OSError, ValueError):
        return


def _essence(reason: str) -> str:
    """The last cause, in one line: what was being retried when the time was over, rather than that it was over."""
    *_, cause = reason.split("while retrying: ")
    return " ".join(cause.removeprefix("filestream: ").removesuffix(". got response: <nil>").split())
