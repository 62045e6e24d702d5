"""Many runs with a line for each, as ``dist-wandb show`` prints them: what differs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dist_wandb.cli.formatting import number, table
from dist_wandb.cli.show_cards import STATES
from dist_wandb.errors import visible
from dist_wandb.reading.ranks import of_rank
from dist_wandb.reading.runs import LocalRun
from dist_wandb.reading.selection import differing, value_of

_MOST_SETTINGS, _MOST_METRICS = 4, 4  # columns
_LONGEST = 24  # characters of a cell
_PARTS_OF_SPREAD = ("/min", "/max", "/std", "/argmax_rank")


def runs_table(runs: Sequence[LocalRun], patterns: Sequence[str] | None) -> RenderableType:
    """A table with a line for each run.

    Args:
        runs: The runs.
        patterns: Of the metrics whose last values are shown; `None` for those that most runs have.
    """
    settings, metrics = differing(runs)[:_MOST_SETTINGS], _metrics_of(runs, patterns)
    shown = table()
    for title in ("", "run", "name", "group", "started", "rows", "writers"):
        is_number = title in ("rows", "writers")
        if _is_needed(title, runs):
            shown.add_column(title, justify="right" if is_number else "left", no_wrap=title in ("", "started"))
    for name in (*settings, *metrics):
        shown.add_column(Text(_cell(name)), justify="right", overflow="fold")
    for run in runs:
        _add(shown, run, runs, settings, metrics)
    return shown


def _add(
    shown: Table, run: LocalRun, runs: Sequence[LocalRun], settings: Sequence[str], metrics: Sequence[str]
) -> None:
    own = {
        "": Text("●", STATES[run.state][0]),
        "run": Text(visible(run.id), "bold"),
        "name": Text(visible(run.name or "")),
        "group": Text(visible(run.group or "")),
        "started": Text(_day_and_time(run.started)),
        "rows": Text(str(run.rows)),
        "writers": Text(str(len(run.writers))),
    }
    cells = [cell for title, cell in own.items() if _is_needed(title, runs)]
    cells += [Text(_cell(value_of(run, f"config.{name}"))) for name in settings]
    cells += [Text(number(run.metrics[name].last) if name in run.metrics else "") for name in metrics]
    shown.add_row(*cells)


def _is_needed(title: str, runs: Sequence[LocalRun]) -> bool:
    if title == "name":
        return any(run.name for run in runs)
    if title == "group":
        return any(run.group for run in runs)
    return title != "writers" or any(len(run.writers) > 1 for run in runs)


def _metrics_of(runs: Sequence[LocalRun], patterns: Sequence[str] | None) -> list[str]:
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(
            name
            for name in run.metrics
            if (any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else _is_telling(name, run))
        )
    most = len(counts) if patterns else _MOST_METRICS
    return [name for name, _ in counts.most_common(min(most, 20))]


def _is_telling(name: str, run: LocalRun) -> bool:
    return name != run.step_axis and of_rank(name) is None and not name.endswith(_PARTS_OF_SPREAD)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return number(value)
    text = visible("" if value is None else str(value)[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _day_and_time(started: str | None) -> str:
    return visible((started or "")[:16]).replace("T", " ")
