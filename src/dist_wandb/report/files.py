"""Read one ``.wandb`` file for a report."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.report.console import ConsoleTail
from dist_wandb.report.rows import Rows
from dist_wandb.report.thinning import Budget, Curve
from dist_wandb.wandb_files.inspection import UNUSED, inspect
from dist_wandb.wandb_files.reading import Contents, StoredRun
from dist_wandb.wandb_files.small_files import Directory

MOST_SYSTEM = 500
"""Largest number of system metrics that the page shows of one file."""

_LONGEST_NAME = 200  # characters
_LABEL = re.compile(r"/l:.*$", re.DOTALL)  # W&B adds it to the names of a shared writer's system metrics
_NUMBERED = re.compile(r"^(.*?)\.(\d{1,4})(?=\.|$)(.*)$", re.DOTALL)


@dataclass(frozen=True)
class FileForReport:
    """The data of one file that a report needs."""

    stored: StoredRun  # the run that the file describes; its `metrics` are empty
    rows: Rows
    system: dict[tuple[str, str], Curve]  # by name and part (``"gpu 0"``; empty for the whole)
    console: ConsoleTail  # the last lines that the process printed


class Reader:
    """Collects the records of one file; `metrics` are patterns of the metrics to keep."""

    def __init__(self, budget: Budget, metrics: Iterable[str] = ("*",)) -> None:
        self.rows: Rows = Rows(budget, metrics)
        self.contents: Contents = Contents()
        self.system: dict[tuple[str, str], Curve] = {}
        self.console: ConsoleTail = ConsoleTail()
        self._budget = budget
        self._started = math.nan
        self._parts: dict[str, tuple[str, str]] = {}

    def add(self, record: dict[str, Any]) -> None:
        """Add one record."""
        kind = record["type"]
        if kind == "history":
            item = record["history"].get("item")
            if isinstance(item, dict):
                self.rows.add(item)
        elif kind == "metric":
            self.rows.axes.define(record["metric"])
        elif kind == "stats":
            self._add_sample(record["stats"])
        elif kind == "output_raw":
            line = record["output_raw"].get("line")
            if isinstance(line, str):
                self.console.add(line)
        elif kind in ("run", "config", "exit"):
            self.contents.add(record)

    def result(self, path: Path, problems: list[str], directory: Directory | None = None) -> FileForReport:
        """Return the collected data; `problems` are damaged parts of the file, as sentence fragments.

        Raises `ReadError` if the records contain no data of a run.
        """
        self.console.end()
        self.contents.rows = self.rows.progress.rows
        if not self.contents.run and not self.contents.rows:
            reason = f": {'; '.join(problems)}" if problems else " yet"
            raise ReadError(f"{path}: no data of a run can be read from it{reason}.")
        stored = self.contents.with_sidecar(path, problems, directory)
        return FileForReport(stored, self.rows, self.system, self.console)

    def _add_sample(self, stats: dict[str, Any]) -> None:
        """Add a sample of system metrics, at the minutes since the first sample."""
        items, seconds = stats.get("item"), _seconds(stats.get("timestamp"))
        if not isinstance(items, dict) or seconds is None:
            return
        if math.isnan(self._started):
            self._started = seconds
        for name, value in items.items():
            if type(value) is not float and type(value) is not int:
                continue
            key = self._parts.get(name) or self._part(name)
            curve = self.system.get(key)
            if curve is None:
                if len(self.system) == MOST_SYSTEM:
                    continue
                curve = self.system[key] = Curve(self._budget)
            curve.add((seconds - self._started) / 60, value)

    def _part(self, name: str) -> tuple[str, str]:
        """Return the name of a system metric without its numbered part (such as a GPU), and that part."""
        plain = _LABEL.sub("", name[:_LONGEST_NAME]).removeprefix("system.")
        numbered = _NUMBERED.match(plain)
        found = (f"{numbered[1]}{numbered[3]}", f"{numbered[1]} {numbered[2]}") if numbered else (plain, "")
        if len(self._parts) < 10 * MOST_SYSTEM:
            self._parts[name] = found
        return found


def read_for_report(
    path: Path,
    directory: Directory,
    budget: Budget,
    *,
    metrics: Iterable[str] = ("*",),
    stopped: threading.Event | None = None,
) -> FileForReport:
    """Read one file; the curves of all files share one `budget`. Raises `ReadError` if no data of a run can be read."""
    reader = Reader(budget, metrics)
    skipped = UNUSED - {"stats", "output_raw"}
    problems = inspect(path, reader.add, stopped, skipped=skipped, in_order=False, within=directory)
    return reader.result(path, problems, directory)


def _seconds(timestamp: object) -> float | None:
    """Return the seconds since the epoch of a time in W&B's format; `None` if it is not one."""
    if not isinstance(timestamp, str) or len(timestamp) > 40:  # noqa: PLR2004
        return None
    text = re.sub(r"(\.\d{6})\d+", r"\1", timestamp).replace("Z", "+00:00")  # Python 3.10 cannot parse nanoseconds
    text = re.sub(r"\.(\d{1,5})(?=[+-])", lambda found: f".{found[1]:0<6}", text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
