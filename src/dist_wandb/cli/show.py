"""``dist-wandb show``: print the W&B runs below a directory."""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from dist_wandb.cli import command
from dist_wandb.cli.show_cards import SPARKLINE_WIDTH, STATES, card, follow, matching, started_last
from dist_wandb.cli.uploads.plan import is_uploaded
from dist_wandb.errors import ConfigurationError, ReadError, visible
from dist_wandb.settings.config_values import redacted
from dist_wandb.wandb_files.reading import StoredRun, trend_of
from dist_wandb.wandb_files.runs import LocalRun, brought_together, parts_of, rows_of, runs_below
from dist_wandb.wandb_files.selection import SPREAD, check_metrics, differing, of_rank, ordered, value_of
from dist_wandb.wandb_files.sidecar import stalls_of

_MOST_SETTINGS, _MOST_METRICS, _MOST_MATCHING_METRICS = 4, 4, 20  # columns
_RANKS = {"state": 4, "started": 5, "name": 6, "rows": 100, "group": 101, "writers": 102}  # as in `Column`
_LONGEST = 24  # characters of a cell
_LONGEST_ID, _ROWS_AT_ONCE = 64, 200  # in characters: a longer id is folded
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_MOST_CARDS = 5  # more runs are a table, unless --details is given


def add_to(commands: Any) -> None:
    parser = command.add_command(
        commands,
        "show",
        _run,
        summary="print the W&B runs below a directory",
        about="Print the W&B runs below a directory: their writers, how they ended, and the last, smallest and "
        "largest value of each metric. Many runs are a table. Nothing is uploaded or changed. Exit code 1 if a run "
        "cannot be read.",
        example="wandb --last --metric 'val/*'",
    )
    selection = command.add_selection_arguments(parser)
    selection.add_argument("--sort", metavar="KEY", help="sort by a value, such as val/loss")
    selection.add_argument("--reverse", action="store_true", help="reverse the order")
    content = parser.add_argument_group("what to show")
    content.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="show only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    view = content.add_mutually_exclusive_group()
    view.add_argument("--details", action="store_true", help=f"each run in full, even more than {_MOST_CARDS} runs")
    view.add_argument("--compare", action="store_true", help="a line for each run, with the settings that differ")
    view.add_argument("--rows", nargs="+", metavar="NAME", help="the rows of the metrics with these names or patterns")
    view.add_argument("--follow", action="store_true", help="follow the last run, or the named runs, until they end")
    command.add_secrets_argument(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON, with NaN and infinities as strings")
    output.add_argument("--csv", action="store_true", help="print the rows of --rows as CSV")


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    directories, names = command.directories_and_names(arguments.what)
    patterns = arguments.metric or ["*"]
    wanted = ["*"] if arguments.where or arguments.sort else None if arguments.rows else patterns  # for statistics
    with command.working("reading the runs"):
        files, errors = runs_below(directories, wanted)
    all_runs = brought_together(files)
    arguments.last |= arguments.follow and not names
    runs = command.selected(all_runs, names, arguments) if all_runs else []
    if arguments.sort:
        runs = ordered(runs, arguments.sort, reverse=arguments.reverse)
    elif arguments.reverse:
        runs = runs[::-1]
    if arguments.follow:
        is_chosen = names or arguments.state or arguments.where
        files_named = {path.name for run in runs for path in run.files} if is_chosen else started_last(directories)
        runs = follow(directories, files_named, patterns, command.console()) if files_named else runs
        followed = {path for run in runs for path in run.files}
        all_runs, errors = all_runs or runs, [error for error in errors if error[0] not in followed]
    if not arguments.secrets:
        runs = [replace(run, config=redacted(run.config)) for run in runs]
    found = {name for run in runs for name in (*run.metrics, run.step_axis)}
    if arguments.rows:
        kind = "csv" if arguments.csv else "json" if arguments.json else "table"
        found = {*found, *print_rows(runs, arguments.rows, kind)}
    elif arguments.json:
        unreadable = [{"path": str(path), "reason": str(error)} for path, error in errors]
        as_json = [run_as_json(run, patterns) for run in runs]
        command.print_json({"directories": list(map(str, directories)), "runs": as_json, "unreadable": unreadable})
    else:
        is_table = arguments.compare or (len(runs) > _MOST_CARDS and not arguments.details)
        _print(command.console(), runs, arguments.metric, is_table=is_table, is_sorted=bool(arguments.sort))
        _print_end(command.console(), directories, runs, len(all_runs), errors)
    if not all_runs:
        below = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(f"None of the runs below {below} could be read: the reasons are above.")
    if runs:
        known = lambda: [name for file in runs_below(directories)[0] for name in file.metrics]  # noqa: E731
        check_metrics(arguments.rows or arguments.metric or (), found, known)
    return 1 if errors else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.csv and not arguments.rows:
        raise ConfigurationError("--csv is for rows. Name the metrics: --rows NAME... --csv")
    if arguments.follow and arguments.json:
        raise ConfigurationError("--follow prints no JSON. Leave out one of the two.")


def _print(
    out: Console, runs: Sequence[LocalRun], patterns: Sequence[str] | None, *, is_table: bool, is_sorted: bool
) -> None:
    jobs: dict[object, list[LocalRun]] = {}  # a job with a run for each rank has several
    for run in runs:
        jobs.setdefault(id(run) if is_sorted else run.writers[0].parts[0].job or id(run), []).append(run)
    if is_table and runs:
        out.print(runs_table(list(jobs.values()), patterns, out.width), crop=False)
        for run in runs:
            for problem in run.problems:
                out.print(Text(f"! {visible(run.id)}: {visible(problem)}", "yellow"), soft_wrap=True)
        out.print()
        return
    for job in jobs.values():
        if len(job) > 1:
            one = _as_one(job)
            out.print(Text.assemble("job ", (visible(one.id), "bold"), f"  {one.name}\n"), soft_wrap=True)
        for run in job:
            heading, metrics = card(run, patterns or ["*"], out.width)
            out.print(heading, soft_wrap=True)
            out.print(metrics)
            out.print()


def _as_one(job: Sequence[LocalRun]) -> LocalRun:
    """Return the job that has a run for each rank as one run, without config and metrics."""
    part = job[0].writers[0].parts[0]
    size = f"{len(job)} runs of {part.sidecar.world_size if part.sidecar else 0} ranks"
    writers = tuple(
        replace(writer, primary=False, parts=tuple(map(_without_metrics, writer.parts)))
        for run in job
        for writer in run.writers
    )
    return replace(job[0], id=(part.job or ("",))[-1], name=size, config={}, writers=writers)


def _without_metrics(part: StoredRun) -> StoredRun:
    bare = copy(part)  # `replace` cannot make a file that is followed
    bare.metrics = {}
    return bare


def _print_end(
    out: Console,
    directories: Sequence[Path],
    runs: Sequence[LocalRun],
    number_of_all: int,
    errors: Sequence[tuple[Path, ReadError]],
) -> None:
    for _, error in errors:
        out.print(Text.assemble(("✗ not readable  ", "red"), str(error), "\n"), soft_wrap=True)
    files = sum(len(run.files) for run in runs)
    in_files = "" if files == len(runs) else f" in {files} files"
    of_all = "" if len(runs) == number_of_all else f" of {number_of_all}"
    states = [run.state for run in runs]
    parts = [f"{states.count(state)} {words}" for state, (_, words) in STATES.items() if state in states]
    parts += [f"{command.number_of(len(errors), 'file')} not readable"] if errors else []
    below = ", ".join(visible(str(directory)) for directory in directories)
    counted = f"{command.number_of(len(runs), 'run')}{of_all}{in_files} below {below}"
    out.print(Text(": ".join([counted, ", ".join(parts)]) if parts else counted), soft_wrap=True)


def run_as_json(run: LocalRun, patterns: Sequence[str]) -> dict[str, Any]:
    parts = parts_of(run)
    about = ("name", "project", "group", "job_type", "tags", "config", "started", "state", "exit_code", "rows")
    return {
        "run_id": run.id,
        **{name: getattr(run, name) for name in about},
        "step_axis": run.step_axis,
        "path": str(run.writers[0].path),
        "uploaded": all(map(is_uploaded, parts)),
        "problems": run.problems,
        "stalls": [stall._asdict() for stall in stalls_of(part.directory for part in parts)[0]],
        "has_more_metrics": any(part.has_more_metrics for part in parts),
        "writers": [
            {
                **{name: getattr(writer, name) for name in ("label", "rank", "node", "primary", "state", "rows")},
                "files": [str(part.path) for part in writer.parts],
                "problems": writer.problems,
                "sidecar": asdict(job) if (job := writer.parts[-1].sidecar) else None,
            }
            for writer in run.writers
        ],
        "metrics": {
            name: {**asdict(metric), "trend": trend_of(metric.trend, SPARKLINE_WIDTH)}
            for name, metric in matching(run.metrics, patterns).items()
        },
    }


def runs_table(jobs: Sequence[Sequence[LocalRun]], patterns: Sequence[str] | None, width: int) -> RenderableType:
    """Return a table of the runs, by job: what differs, and the metrics that match `patterns` (`None`: of most)."""
    lines: list[LocalRun] = []
    for job in jobs:
        lines += [_as_one(job), *(replace(run, id=f"  {run.id}") for run in job)] if len(job) > 1 else job
    states = {line.state for line in lines}  # if it is one, the last line says it
    own = {
        "": [Text("●", STATES[line.state][0]) for line in lines],
        "run": [Text(visible(line.id), "bold") for line in lines],
        "name": [Text(visible(line.name or "")) for line in lines],
        "group": [Text(visible(line.group or "")) for line in lines],
        "state": [Text(line.state, STATES[line.state][0]) for line in lines if len(states) > 1],
        "started": [Text(visible((line.started or "")[:16]).replace("T", " ")) for line in lines],  # day and time
        "rows": [Text(str(line.rows)) for line in lines],
        "writers": [Text(str(len(line.writers)) if len(line.writers) > 1 else "") for line in lines],
    }
    columns = [
        command.Column(title, cells, _RANKS.get(title, 0), "right" if title in ("rows", "writers") else "left")
        for title, cells in own.items()
        if title in ("", "run", "started", "rows") or any(cells)
    ]
    lengths = [cell.cell_len for cell in own["run"] if cell.cell_len <= _LONGEST_ID] or [_LONGEST_ID]
    columns[1] = columns[1]._replace(width=max(3, *lengths))  # so that it does not cost all runs their columns
    runs = [run for job in jobs for run in job]
    for rank, name in enumerate(differing(runs)[:_MOST_SETTINGS], start=1):
        cells = [Text(_cell(value_of(line, f"config.{name}"))) for line in lines]
        columns.append(command.Column(_cell(name), cells, 2 * rank))
    for rank, name in enumerate(_metrics_of(runs, patterns), start=1):
        cells = [Text(command.number(line.metrics[name].last) if name in line.metrics else "") for line in lines]
        columns.append(command.Column(_cell(name), cells, 2 * rank - 1))
    shown, left_out = command.fitting(columns, width)
    return Group(command.table_of(shown), *left_out)


def _metrics_of(runs: Sequence[LocalRun], patterns: Sequence[str] | None) -> list[str]:
    counts: Counter[str] = Counter()
    of_spread = tuple(f"/{kind}" for kind in SPREAD)
    for run in runs:
        for name in run.metrics:
            is_informative = name != run.step_axis and of_rank(name) is None and not name.endswith(of_spread)
            if any(fnmatchcase(name, pattern) for pattern in patterns) if patterns else is_informative:
                counts[name] += 1
    return [name for name, _ in counts.most_common(_MOST_MATCHING_METRICS if patterns else _MOST_METRICS)]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return command.number(value)
    text = visible("" if value is None else str(value)[: 2 * _LONGEST])
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def print_rows(runs: Sequence[LocalRun], names: Sequence[str], kind: str) -> set[str]:
    # Rows of names without patterns are printed while they are read. Returns the names that have values.
    named: set[str] = set()
    tables: list[tuple[LocalRun, list[str], Iterator[Sequence[Any]]]] = []
    if kind == "json" or any(re.search(r"[*?\[]", name) for name in names):
        columns = [(run, run.history(names)) for run in runs]
        tables += [(run, list(own), zip(*own.values(), strict=True)) for run, own in columns]
        named = {name for _, own in columns for name, column in own.items() if column.count(None) < len(column)}
    else:
        titles_of = [(run, list(dict.fromkeys((run.step_axis, *names)))) for run in runs]
        tables += [(run, titles, rows_of(run, titles, named)) for run, titles in titles_of]
    if kind == "json":
        command.print_json([{"run_id": run.id, "project": run.project, "columns": own} for run, own in columns])
    if kind == "csv":
        _print_csv(tables)
    for run, titles, rows in tables if kind == "table" else ():
        out = command.console()
        out.print(Text.assemble("● ", (visible(run.id), "bold"), f"  {visible(run.name or '')}"), soft_wrap=True)
        _print_table(out, titles, rows)
        out.print()
    return named


def _print_table(out: Console, titles: Sequence[str], rows: Iterator[Sequence[Any]]) -> None:
    """Print rows while they are read; columns become wider where a later cell is."""
    batch = list(islice(rows, _ROWS_AT_ONCE))
    columns = [
        command.Column(visible(title), [Text(_in_words(row[place])) for row in batch], place)
        for place, title in enumerate(titles)
    ]
    shown, left_out = command.fitting(columns, out.width)
    out.print(Group(*left_out, command.table_of(shown)), crop=False)
    widths = {column.rank: column.room - 2 for column in shown}
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        lines = [{place: _in_words(row[place]) for place in widths} for row in batch]
        widths = {place: max(width, *(cell_len(line[place]) for line in lines)) for place, width in widths.items()}
        for line in lines:
            padded = (" " * (width - cell_len(line[place])) + line[place] for place, width in widths.items())
            out.file.write(f"{'  '.join(padded)}\n")


def _print_csv(tables: Sequence[tuple[LocalRun, list[str], Iterator[Sequence[Any]]]]) -> None:
    titles = dict.fromkeys(title for _, titles, _ in tables for title in titles)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["run", *map(_text, titles)])
    for run, own, rows in tables:
        for row in rows:
            values = dict(zip(own, row, strict=True))
            writer.writerow([_text(run.id), *(_as_cell(values.get(title)) for title in titles)])


def _as_cell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return command.number(value)
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
        return command.number(value)
    return visible(value if isinstance(value, str) else json.dumps(value))
