"""The run files below directories: find and read them, as all commands do first; and rows and summary of some of them.

Rows are read as columns, of which only the requested ones are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.finding import find_files
from dist_wandb.wandb_files.reading import MOST_METRICS, MOST_VALUES, StoredRun, read_runs, rows_in
from dist_wandb.wandb_files.records import read_records
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


def columns_of(files: Iterable[StoredRun], axis: str, names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Read the requested columns of rows, one file after the other; the first column is the x axis.

    `names` may be patterns such as ``val/*``; `None` for all except W&B's own, which start with an underscore. A row
    without a requested value other than the x axis is skipped. Raises `ReadError` for too many values.
    """
    patterns = ["[!_]*"] if names is None else [name for name in names if re.search(r"[*?\[]", name)]
    columns: dict[str, list[Any]] = {axis: [], **{name: [] for name in names or () if name not in patterns}}
    choices = [*map(translate, patterns), *map(re.escape, patterns)]  # a name may look like a pattern
    is_wanted = lru_cache(MOST_METRICS)(re.compile("|".join(choices) or "(?!)").fullmatch)
    count = 0

    def check() -> None:
        if len(columns) > MOST_METRICS + 1:
            raise ReadError(f"More than {MOST_METRICS} names match. Request fewer names.")
        if count * len(columns) > MOST_VALUES:
            raise ReadError(
                f"{count} rows of {len(columns)} names are more than {MOST_VALUES} values. Request fewer names, or one "
                "writer."
            )

    for file in files:
        for row in rows_in(file.path, file.directory):
            wanted = [name for name in row if name in columns or (len(name) <= _LONGEST_NAME and is_wanted(name))]
            if not wanted or wanted == [axis]:
                continue
            for name in wanted:
                if name not in columns:
                    columns[name] = []
                    check()  # before it is filled
                column = columns[name]
                column.extend([None] * (count - len(column)))
                column.append(row[name])
            count += 1
            check()
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return columns


def rows_of(files: Iterable[StoredRun], names: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the values of names, the first of which is the x axis, in each row that has another one of them."""
    for file in files:
        for row in rows_in(file.path, file.directory):
            if any(name in row for name in names[1:]):
                yield [row.get(name) for name in names]


def summary_of(files: Iterable[StoredRun]) -> dict[str, Any]:
    """Read the summary of a run from its files, without W&B's own names. Values of later files replace earlier ones."""
    summary: dict[str, Any] = {}
    for file in files:
        for kind, contents in read_records(file.path, skipped=("stats", "output_raw"), within=file.directory):
            changes = contents if kind == "summary" else {}
            # A killed process may have written no summary of its last rows.
            update = contents if kind == "history" else changes.get("update", {})
            for name, value in update.items():
                is_kept = name in summary or len(summary) < MOST_METRICS
                if name[:1] != "_" and is_kept and len(name) <= _LONGEST_NAME:
                    summary[name] = value
            for name in changes.get("remove", ()):
                summary.pop(name, None)
    return summary
