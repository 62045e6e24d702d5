"""Ledgers of the values that ranks log: one file for each process, line by line, so that a kill loses nothing."""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class Ledger:
    """Writes the entries of a rank, even from signal handlers, threads and forks."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self.rank = rank
        self._file = self._owner = -1
        self._numbers = itertools.count()
        self._calls: Counter[int] = Counter()

    def write(self, event: str, **facts: Any) -> None:
        if self._owner != os.getpid():
            path = self._directory / f"ledger-{self.rank}-{os.getpid()}.jsonl"
            self._file, self._owner = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), os.getpid()
        line = json.dumps({"event": event, "rank": self.rank, "pid": os.getpid(), "at": time.time(), **facts})
        os.write(self._file, f"{line}\n".encode())

    def intend(
        self,
        session: int,
        cells: Mapping[str, tuple[int, float]],
        *,
        weight: float | None = None,
        step: int | None = None,
        axes: Mapping[str, float] | None = None,
    ) -> int:
        """Record a whole call before its values are logged, and return its number, for `done`."""
        number, call = next(self._numbers), self._calls[session]
        self._calls[session] += 1
        whole = {"cells": dict(cells), "weight": weight, "step": step, "axes": dict(axes or {})}
        self.write("log", number=number, session=session, call=call, **whole)
        return number

    def done(self, number: int) -> None:
        self.write("done", number=number)


def watch_messages(ledger: Ledger) -> None:
    """Write the package's messages into the ledger from now on; they are printed as before."""

    def emit(record: logging.LogRecord) -> None:
        ledger.write("warning", text=record.getMessage(), trace=record.exc_info is not None)

    writing = logging.Handler(logging.WARNING)
    writing.emit = emit  # type: ignore[method-assign]
    for handler in (writing, logging.StreamHandler()):
        logging.getLogger("dist_wandb").addHandler(handler)


def read(directory: Path) -> list[Entry]:
    """Return the entries of all ranks, without a last line that a kill has truncated."""
    lines = [line for path in directory.glob("ledger-*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]
