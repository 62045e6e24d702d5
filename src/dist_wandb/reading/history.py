"""The rows of files as columns, read in one pass; what was not asked for is not kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.inspection import inspect
from dist_wandb.wandb_files.reading import MOST_METRICS, with_floats

MOST_CELLS = 50_000_000
"""Largest number of rows times columns that is kept."""

_LONGEST_NAME = 1000  # characters


class Columns:
    """Takes rows, and keeps the columns that are wanted, of equal length.

    Args:
        axis: Name of the x axis, the first column.
        names: Names, or patterns such as ``val/*``; `None` for all but W&B's own, which begin with an underscore.
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
        """Add a row; it is passed over if it has nothing that is wanted but the x axis."""
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
        if self.rows * len(self.columns) > MOST_CELLS:
            raise ReadError(
                f"{self.rows} rows of {len(self.columns)} names are more than {MOST_CELLS} values. Ask for fewer "
                "names, or for one writer."
            )

    def filled(self) -> dict[str, list[Any]]:
        """The columns, with `None` where a row lacks a value."""
        for column in self.columns.values():
            column.extend([None] * (self.rows - len(column)))
        return self.columns

    def _is_new(self, name: str) -> bool:
        """Whether a name is one of those wanted, met for the first time."""
        if name in self._exact:
            return True
        if len(name) <= _LONGEST_NAME and self._matches(name):
            if len(self.columns) > MOST_METRICS:
                raise ReadError(f"More than {MOST_METRICS} names match. Ask for fewer of them.")
            return True
        if len(self._unwanted) < MOST_METRICS and len(name) <= _LONGEST_NAME:
            self._unwanted.add(name)
        return False


def columns_of(paths: Iterable[Path], axis: str, names: Sequence[str] | None) -> dict[str, list[Any]]:
    """Read the history of files, one after the other.

    Args:
        paths: The files.
        axis: As for `Columns`.
        names: As for `Columns`.

    Raises:
        ReadError: A file cannot be read at all, or too much is asked for.
        UnsupportedVersionError: The installed wandb cannot print ``.wandb`` files.
    """
    columns = Columns(axis, names)

    def on_record(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            item = record["history"].get("item")
            if isinstance(item, dict):
                columns.add(item)

    for path in paths:
        inspect(path, on_record, in_order=False)
    return columns.filled()
