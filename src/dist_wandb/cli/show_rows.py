"""The rows of runs as numbers: ``dist-wandb show --rows NAME...``."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from dist_wandb.cli.formatting import console, number, print_json, table
from dist_wandb.errors import visible
from dist_wandb.reading.runs import LocalRun

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def print_rows(runs: Sequence[LocalRun], names: Sequence[str], kind: str) -> None:
    """Print rows, run by run.

    Args:
        runs: The runs.
        names: Names or patterns.
        kind: ``"csv"``, ``"json"`` or ``"table"``.
    """
    if kind == "json":
        print_json([{"run_id": run.id, "project": run.project, "columns": run.history(names)} for run in runs])
        return
    if kind == "csv":
        _print_csv(runs, names)
        return
    out = console()
    for run in runs:
        columns = run.history(names)
        shown = table()
        for name in columns:
            shown.add_column(Text(visible(name)), justify="right", overflow="fold")
        for row in zip(*columns.values(), strict=True):
            shown.add_row(*(Text(_in_words(value)) for value in row))
        out.print(Text.assemble("● ", (visible(run.id), "bold"), f"  {visible(run.name or '')}"), soft_wrap=True)
        out.print(shown)
        out.print()


def _print_csv(runs: Sequence[LocalRun], names: Sequence[str]) -> None:
    """One table for all runs, with the id of the run in the first column of each row."""
    found = [(run, run.history(names)) for run in runs]
    titles = dict.fromkeys(name for _, columns in found for name in columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["run", *map(_text, titles)])
    for run, columns in found:
        length = len(next(iter(columns.values())))
        for index in range(length):
            row = [columns[name][index] if name in columns else None for name in titles]
            writer.writerow([_text(run.id), *map(_as_cell, row)])


def _as_cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return number(value)
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value) if isinstance(value, dict | list | bool) else value


def _text(text: str) -> str:
    """A text from a file that neither a terminal nor a spreadsheet obeys."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULAS) else shown


def _in_words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return visible(value if isinstance(value, str) else json.dumps(value))
