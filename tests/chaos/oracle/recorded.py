"""What a run has left on disk, in a form in which two runs can be compared.

The package's reader does not tell a nested value from one with a dot in its name, so the records are read without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from record_files import new_record
from stored import find_runs

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.record_file import records_of

_LONGEST_WRITE = 20.0  # seconds that wandb's process may need after `finish` to complete a file


@dataclass
class Recorded:
    """The contents of one ``.wandb`` file."""

    # the rows, in the order of writing, with all of W&B's values
    rows: list[dict[str, Any]] = field(default_factory=list)
    # the values by flat name, such as ``val/acc.max``; a dot of a name itself is ``\.``
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # the values by name
    axes: dict[str, str] = field(default_factory=dict)  # the user's x axis of each defined name or pattern, and ours
    exit_code: int | None = None  # exit code of the run; `None` if the file has no end
    problem: str = ""  # why nothing could be read

    def axis_of(self, name: str) -> str:
        """Return the x axis of a name: its own, else that of the longest matching pattern; empty for wandb's step."""
        if name in self.axes:
            return self.axes[name]
        patterns = [axis for axis in self.axes if axis.endswith("*") and name.startswith(axis.removesuffix("*"))]
        return self.axes[max(patterns, key=len)] if patterns else ""

    def take(self, record: Any) -> None:
        """Add one record of W&B's."""
        kind = record.WhichOneof("record_type")
        if kind in ("config", "run"):
            change = record.run.config if kind == "run" else record.config
            self.config.update({_name(item): json.loads(item.value_json) for item in change.update})
            for item in change.remove:
                self.config.pop(_name(item), None)
        elif kind == "metric":
            self.axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
        elif kind == "exit":
            self.exit_code = record.exit.exit_code
        elif kind == "history":
            self.rows.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        elif kind == "summary":
            for item in (*record.summary.remove, *record.summary.update):
                name = _name(item)
                for old in [old for old in self.summary if old == name or old.startswith(f"{name}.")]:
                    del self.summary[old]
            for item in record.summary.update:
                self.summary.update(_flat(_name(item), json.loads(item.value_json)))


def _name(item: Any) -> str:
    return ".".join(part.replace(".", "\\.") for part in item.nested_key or [item.key])


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {path: leaf for inner, each in value.items() for path, leaf in _flat(f"{name}.{inner}", each).items()}


def recorded_runs(directory: Path, names: list[str]) -> dict[str, Recorded]:
    """Return the runs below a directory by id, after all have ended; one with a `problem` for each that is missing."""
    deadline = time.monotonic() + _LONGEST_WRITE
    found: dict[str, Recorded] = {}
    while True:
        paths: dict[str, list[Path]] = {}
        for path in find_runs(directory):
            paths.setdefault(path.stem.removeprefix("run-"), []).append(path)
        for name in names:
            if name not in found or found[name].exit_code is None:
                found[name] = _read(paths.get(name, []))
        if all(run.exit_code is not None for run in found.values()) or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def _read(paths: list[Path]) -> Recorded:
    run = Recorded()
    if len(paths) != 1:
        run.problem = f"{len(paths)} files of this run, instead of one"
        return run
    try:
        for content, _ in records_of(paths[0]):
            record = new_record()
            record.ParseFromString(content)
            run.take(record)
    except ReadError as error:
        run.problem = str(error)
    return run
