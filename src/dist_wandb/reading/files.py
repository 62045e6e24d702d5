"""The run files below directories: find and read them, as all commands do first; and rows and summary of some of them.

Rows are read as columns, of which only the requested ones are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.finding import find_files
from dist_wandb.wandb_files.reading import MOST_METRICS, MOST_VALUES, StoredRun, read_runs, rows_in, with_floats
from dist_wandb.wandb_files.records import inspect, records_of
from dist_wandb.wandb_files.small_files import Directory

_LONGEST_NAME = 1000  # characters


def files_below(directories: Sequence[Path]) -> tuple[dict[Path, Directory], list[tuple[Path, ReadError]]]:
    """Find the run files below directories, each once; and the directories that were not searched completely."""
    files: dict[tuple[int, int, str], tuple[Path, Directory]] = {}  # by directory and name
    unseen: list[tuple[Path, ReadError]] = []
    for directory in directories:
        errors: list[ReadError] = []
        for path, within in find_files(directory, errors.append).items():
            files[within.device, within.inode, path.name] = path, within
        unseen += [(directory, error) for error in errors]
    if not files and not unseen:
        where = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(
            f"No W&B run was found below {where}: no run-* or offline-run-* directory there contains a run-*.wandb "
            "file. Give the directory that W&B wrote to (`dir=`, by default ./wandb)."
        )
    return dict(files.values()), unseen


def runs_below(
    directories: Sequence[Path], metrics: Iterable[str] | None = ("*",)
) -> tuple[list[StoredRun], list[tuple[Path, ReadError]]]:
    """Read the run files below directories; return the runs and what could not be read. Raises as `files_below`."""
    files, unseen = files_below(directories)
    runs, unreadable = read_runs(files, metrics=metrics)
    return runs, [*unreadable.items(), *unseen]


class Columns:
    """Collects the requested columns of rows; the first column is the x axis.

    `names` may be patterns such as ``val/*``; `None` for all except W&B's own, which start with an underscore.
    """

    def __init__(self, axis: str, names: Sequence[str] | None) -> None:
        self.axis = axis
        self.rows: int = 0
        exact = [name for name in names or () if name != axis]
        self._exact = set(exact) | {axis}
        patterns = ["[!_]*"] if names is None else [name for name in exact if re.search(r"[*?\[]", name)]
        self._matches = re.compile("|".join(map(translate, patterns)) or r"(?!)").match
        self.columns: dict[str, list[Any]] = {axis: []}
        self.columns.update({name: [] for name in exact if name not in patterns})
        self._unwanted: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row. A row without a requested value other than the x axis is skipped."""
        columns, unwanted = self.columns, self._unwanted
        found = {
            name: value
            for name, value in row.items()
            if name in columns or (name not in unwanted and self._is_new(name))
        }
        if not found.keys() - {self.axis}:
            return
        for name, value in found.items():
            column = columns.setdefault(name, [])
            if len(column) < self.rows:
                column.extend([None] * (self.rows - len(column)))
            column.append(with_floats(value))
        self.rows += 1
        if self.rows * len(self.columns) > MOST_VALUES:
            raise ReadError(
                f"{self.rows} rows of {len(self.columns)} names are more than {MOST_VALUES} values. Request fewer "
                "names, or one writer."
            )

    def filled(self) -> dict[str, list[Any]]:
        """Return the columns, with `None` for each value that a row lacks."""
        for column in self.columns.values():
            column.extend([None] * (self.rows - len(column)))
        return self.columns

    def _is_new(self, name: str) -> bool:
        if name in self._exact:
            return True
        if len(name) <= _LONGEST_NAME and self._matches(name):
            if len(self.columns) > MOST_METRICS:
                raise ReadError(f"More than {MOST_METRICS} names match. Request fewer names.")
            return True
        if len(self._unwanted) < MOST_METRICS and len(name) <= _LONGEST_NAME:
            self._unwanted.add(name)
        return False


def columns_of(files: Iterable[StoredRun], axis: str, names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Read the history of files, one after the other, as `Columns` does; raise `ReadError` for too many values."""
    columns = Columns(axis, names)

    def on_record(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            columns.add(record["history"]["item"])

    for file in files:
        inspect(file.path, on_record, within=file.directory)
    return columns.filled()


def rows_of(files: Iterable[StoredRun], names: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of names, the first of which is the x axis, in each row that has another one of them."""
    for file in files:
        for row in rows_in(file.path, file.directory):
            if any(name in row for name in names[1:]):
                yield [with_floats(row.get(name)) for name in names]


def summary_of(files: Iterable[StoredRun]) -> dict[str, Any]:
    """Read the summary of a run from its files, without W&B's own names. Values of later files replace earlier ones."""
    summary: dict[str, Any] = {}
    for file in files:
        for record in records_of(file.path, [], skipped=("stats", "output_raw"), within=file.directory):
            found = record or {}
            changes = found.get("summary", {})
            # A killed process may have written no summary of its last rows.
            update = changes.get("update", {}) or found.get("history", {}).get("item", {})
            for name, value in update.items():
                is_kept = name in summary or len(summary) < MOST_METRICS
                if name[:1] != "_" and is_kept and len(name) <= _LONGEST_NAME:
                    summary[name] = with_floats(value)
            for item in changes.get("remove", ()):
                summary.pop(item.get("key"), None)
    return summary
