"""``dist-wandb show``: print the W&B runs below a directory.

Statistics and trends are computed here: ``wandb leet inspect --summary`` has only the last value of each metric.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from dist_wandb.cli.command import Command
from dist_wandb.cli.formatting import console, number, number_of, print_json, shortened, sparkline, table
from dist_wandb.errors import ReadError, visible
from dist_wandb.reading.found import runs_below
from dist_wandb.uploads.plan import is_uploaded
from dist_wandb.wandb_files.reading import StoredRun
from dist_wandb.wandb_files.statistics import MetricHistory

SPARKLINE_WIDTH = 32
"""Largest length of a sparkline in characters; less on a narrow terminal."""

_SHORTEST_SPARKLINE = 8
_COLUMN_GAP = 2
_MOST_METRICS_SHOWN = 1000  # of one file
_INDENT = 2
_STATES = {  # color, and words in the summary
    "finished": ("green", "finished"),
    "failed": ("red", "failed"),
    "unfinished": ("yellow", "without a recorded end"),
}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to look, at any depth; or one .wandb file")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="show only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")


def _run(arguments: argparse.Namespace) -> int:
    directory, patterns = arguments.directory, arguments.metric or ["*"]
    runs, errors = runs_below([directory], patterns)
    if arguments.json:
        print_json(
            {
                "directory": str(directory),
                "runs": [_run_as_json(run, patterns) for run in runs],
                "unreadable": [{"path": str(path), "reason": str(error)} for path, error in errors],
            }
        )
    else:
        out = console()
        for run in runs:
            _print_run(out, run, patterns)
        for _, error in errors:
            out.print(Text.assemble(("✗ not readable  ", "red"), str(error), "\n"), soft_wrap=True)
        out.print(_summary(directory, runs, len(errors)), soft_wrap=True)
    if not runs:
        raise ReadError(f"None of the runs below {str(directory)!r} could be read: the reasons are above.")
    return 1 if errors else 0


def _print_run(out: Console, run: StoredRun, patterns: Sequence[str]) -> None:
    out.print(_heading(run), soft_wrap=True)
    out.print(Padding(_metrics_table(run, patterns, out.width - _INDENT), (0, 0, 0, _INDENT), expand=False))
    out.print()


def _heading(run: StoredRun) -> Text:
    style, _ = _STATES[run.state]
    facts = [number_of(run.rows, "row"), *(["uploaded"] if is_uploaded(run) else [])]
    facts += [f"{what} {visible(value)}" for what, value in (("project", run.project), ("group", run.group)) if value]
    if run.sidecar:
        job = run.sidecar
        facts += [f"{job.run_mode}/{job.rank_scope}", f"rank {job.global_rank} of {job.world_size}"]
        if job.label is not None:
            facts.append(f"label {visible(job.label)}{' (primary)' if job.primary else ''}")
    heading = Text.assemble(("● ", style), (visible(run.run_id), "bold"), "  ", visible(run.name or ""))
    heading.rstrip()
    heading.append("\n  ").append(_state_in_words(run), style).append("".join(f" · {fact}" for fact in facts))
    heading.append("\n  ").append(visible(str(run.path.parent)), "dim")
    for problem in run.problems:
        heading.append("\n  ").append(f"! {visible(problem)}", "yellow")
    return heading


def _state_in_words(run: StoredRun) -> str:
    if run.state == "failed":
        return f"failed (exit code {run.exit_code})"
    return "finished" if run.state == "finished" else "no end recorded (running, or killed)"


def _metrics_table(run: StoredRun, patterns: Sequence[str], width: int) -> RenderableType:
    """One line per metric; the sparkline gets the remaining width."""
    matching = _matching(run, patterns)
    if not matching:
        was_any_logged = run.metrics or list(patterns) != ["*"]
        return Text("no metric matches" if was_any_logged else "no metric was logged", "dim")
    metrics = dict(islice(matching.items(), _MOST_METRICS_SHOWN))
    columns = {
        "metric": [visible(name) for name in metrics],
        "last": [number(metric.last) for metric in metrics.values()],
        "min": [number(metric.smallest) for metric in metrics.values()],
        "max": [number(metric.largest) for metric in metrics.values()],
        "values": [str(metric.count) for metric in metrics.values()],
        "NaN/inf": [str(metric.not_finite or "") for metric in metrics.values()],
    }
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    shown = table()
    for heading in columns:
        shown.add_column(heading, justify="left" if heading == "metric" else "right", overflow="fold")
    shown.add_column("trend", style="cyan", no_wrap=True)
    taken = sum(max(map(cell_len, (heading, *cells))) + _COLUMN_GAP for heading, cells in columns.items())
    room = min(SPARKLINE_WIDTH, max(_SHORTEST_SPARKLINE, width - taken))
    for metric, *cells in zip(metrics.values(), *columns.values(), strict=True):
        shown.add_row(*map(Text, cells), Text(sparkline(metric.trend, room)))
    left_out = len(matching) - len(metrics)
    if left_out or run.has_more_metrics:
        many = f"more than {left_out}" if run.has_more_metrics else str(left_out)
        return Group(shown, Text(f"and {many} beyond these: --metric GLOB picks", "dim"))
    return shown


def _matching(run: StoredRun, patterns: Sequence[str]) -> dict[str, MetricHistory]:
    return {
        name: metric for name, metric in run.metrics.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _summary(directory: Path, runs: Sequence[StoredRun], unreadable: int) -> Text:
    """The summary line. Files of one id, of a shared or a resumed run, count as one run."""
    distinct = {(run.project, run.run_id) for run in runs}
    files = "" if len(distinct) == len(runs) else f" in {len(runs)} files"
    states = [run.state for run in runs]
    parts = [f"{states.count(state)} {words}" for state, (_, words) in _STATES.items() if state in states]
    parts += [f"{number_of(unreadable, 'file')} not readable"] if unreadable else []
    return Text(f"{number_of(len(distinct), 'run')}{files} below {visible(str(directory))}: {', '.join(parts)}")


def _run_as_json(run: StoredRun, patterns: Sequence[str]) -> dict[str, Any]:
    metrics = {
        name: {**asdict(metric), "trend": shortened(metric.trend, SPARKLINE_WIDTH)}
        for name, metric in _matching(run, patterns).items()
    }
    own = {"path": str(run.path), "state": run.state, "label": run.label, "uploaded": is_uploaded(run)}
    return {**asdict(run), **own, "metrics": metrics}


COMMAND = Command(
    name="show",
    summary="print the W&B runs below a directory",
    description="Print the W&B runs below a directory: their writers, how they ended, and the last, smallest and "
    "largest value of each metric. Nothing is uploaded or changed. Exit code 1 if a run cannot be read.",
    example="wandb --metric 'val/*'",
    add_arguments=_add_arguments,
    run=_run,
)
