"""The tables of ``dist-wandb show``: many runs with a line for each, and with ``--rows`` the rows of runs."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dist_wandb.cli.command import console, number, print_json, table
from dist_wandb.cli.show_cards import STATES
from dist_wandb.errors import visible
from dist_wandb.reading.runs import SPREAD, LocalRun, of_rank
from dist_wandb.reading.selection import differing, value_of

_MOST_SETTINGS, _MOST_METRICS, _MOST_MATCHING_METRICS = 4, 4, 20  # columns
_LONGEST = 24  # characters of a cell
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def runs_table(runs: Sequence[LocalRun], patterns: Sequence[str] | None) -> RenderableType:
    """Return a table of the runs: what differs, and the metrics that match `patterns` (`None`: those of most runs)."""
    settings, metrics = differing(runs)[:_MOST_SETTINGS], _metrics_of(runs, patterns)
    optional = {
        "name": any(run.name for run in runs),
        "group": any(run.group for run in runs),
        "writers": any(len(run.writers) > 1 for run in runs),
    }
    titles = ("", "run", "name", "group", "started", "rows", "writers")
    titles = [title for title in titles if optional.get(title, True)]
    shown = table()
    for title in titles:
        is_number = title in ("rows", "writers")
        shown.add_column(title, justify="right" if is_number else "left", no_wrap=title in ("", "started"))
    for name in (*settings, *metrics):
        shown.add_column(Text(_cell(name)), justify="right", overflow="fold")
    for run in runs:
        own = {
            "": Text("●", STATES[run.state][0]),
            "run": Text(visible(run.id), "bold"),
            "name": Text(visible(run.name or "")),
            "group": Text(visible(run.group or "")),
            "started": Text(visible((run.started or "")[:16]).replace("T", " ")),  # day and time
            "rows": Text(str(run.rows)),
            "writers": Text(str(len(run.writers))),
        }
        shown.add_row(
            *(own[title] for title in titles),
            *(Text(_cell(value_of(run, f"config.{name}"))) for name in settings),
            *(Text(number(run.metrics[name].last) if name in run.metrics else "") for name in metrics),
        )
    return shown


def _metrics_of(runs: Sequence[LocalRun], patterns: Sequence[str] | None) -> list[str]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(
            name
            for name in run.metrics
            if (any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else _is_informative(name, run))
        )
    return [name for name, _ in counts.most_common(_MOST_MATCHING_METRICS if patterns else _MOST_METRICS)]


def _is_informative(name: str, run: LocalRun) -> bool:
    is_spread = name.endswith(tuple(f"/{kind}" for kind in SPREAD))
    return name != run.step_axis and of_rank(name) is None and not is_spread


def _cell(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    text = visible("" if value is None else str(value)[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def print_rows(runs: Sequence[LocalRun], names: Sequence[str], kind: str) -> None:
    """Print the rows of metrics, by names or patterns, run by run, as ``"csv"``, ``"json"`` or ``"table"``."""
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
    """Print one table for all runs, with the id of the run in the first column of each row."""
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
    """Return text from a file in a form that neither a terminal nor a spreadsheet interprets."""
    shown = visible(text)
    return f"'{shown}" if shown.startswith(_FORMULAS) else shown


def _in_words(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return visible(value if isinstance(value, str) else json.dumps(value))
