"""What a run has left on disk, in a form in which two runs can be compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stored import find_runs

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.inspection import inspect

_LONGEST_WRITE = 20.0  # seconds that wandb's process may need after `finish` to complete a file


@dataclass
class Recorded:
    """The contents of one ``.wandb`` file.

    Args:
        rows: The rows, in the order of writing, with all of W&B's values.
        summary: The values by flat name, such as ``val/acc.max``.
        config: The values by name.
        axes: The user's x axis of each defined name or pattern, and ours.
        exit_code: Exit code of the run; `None` if the file has no end.
        problem: Why nothing could be read.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    problem: str = ""

    def axis_of(self, name: str) -> str:
        """Return the x axis of a name: its own, else that of the longest matching pattern; empty for wandb's step."""
        if name in self.axes:
            return self.axes[name]
        patterns = [axis for axis in self.axes if axis.endswith("*") and name.startswith(axis.removesuffix("*"))]
        return self.axes[max(patterns, key=len)] if patterns else ""

    def take(self, record: Mapping[str, Any]) -> None:
        """Add one record of the file."""
        kind = record["type"]
        contents = record[kind]
        if kind == "history":
            self.rows.append(contents.get("item", {}))
        elif kind == "summary":
            self._change(self.summary, contents, is_flat=True)
        elif kind in ("config", "run"):
            self._change(self.config, contents.get("config", {}) if kind == "run" else contents, is_flat=False)
        elif kind == "metric":
            self.axes[contents.get("glob_name") or contents["name"]] = contents.get("step_metric", "")
        elif kind == "exit":
            self.exit_code = contents.get("exit_code", 0)

    def _change(self, values: dict[str, Any], change: Mapping[str, Any], *, is_flat: bool) -> None:
        for name, value in change.get("update", {}).items():
            if is_flat:
                for old in [old for old in values if old == name or old.startswith(f"{name}.")]:
                    del values[old]
                values.update(_flat(name, value))
            else:
                values[name] = value
        for name in change.get("remove", ()):
            values.pop(name, None)


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
        problems = inspect(paths[0], run.take, skipped=("stats", "output", "output_raw", "telemetry"))
    except ReadError as error:
        problems = [str(error)]
    run.problem = "; ".join(problems)
    return run
