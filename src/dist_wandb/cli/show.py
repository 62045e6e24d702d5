"""``dist-wandb show``: print the W&B runs below a directory.

Statistics and trends are computed here: ``wandb leet inspect --summary`` has only the last value of each metric.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dist_wandb.cli.command import Command
from dist_wandb.cli.formatting import console, number_of, print_json, shortened
from dist_wandb.cli.show_cards import SPARKLINE_WIDTH, STATES, card, matching
from dist_wandb.cli.show_follow import follow, just_begun
from dist_wandb.cli.show_rows import print_rows
from dist_wandb.cli.show_table import runs_table
from dist_wandb.errors import ConfigurationError, ReadError, visible
from dist_wandb.reading.found import runs_below
from dist_wandb.reading.runs import LocalRun, brought_together
from dist_wandb.reading.selection import Condition, chosen, ordered
from dist_wandb.uploads.plan import is_uploaded
from dist_wandb.wandb_files.environment import usual_directories

_MOST_CARDS = 5  # more runs are a table, unless --details is given


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        metavar="DIR|RUN",
        nargs="*",
        help="where to look, at any depth, or one .wandb file (by default ./wandb, $WANDB_DIR and ./lightning_logs); "
        "and ids, names or patterns of runs",
    )
    pick = parser.add_argument_group("which runs")
    pick.add_argument("--last", action="store_true", help="only the run that was started last")
    pick.add_argument("--state", choices=list(STATES), help="only runs that have ended so; unfinished: no end recorded")
    pick.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs with such a value in their config, or such a last value of a metric: 'lr>=0.1', 'name=night*'; "
        "may be given several times",
    )
    pick.add_argument("--sort", metavar="KEY", help="in the order of a value, such as val/loss")
    pick.add_argument("--reverse", action="store_true", help="in the reverse order")
    look = parser.add_argument_group("what of them")
    look.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="show only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    how = look.add_mutually_exclusive_group()
    how.add_argument(
        "--details", action="store_true", help=f"each run in full, also if they are more than {_MOST_CARDS}"
    )
    how.add_argument("--compare", action="store_true", help="a line for each run, with the settings that differ")
    how.add_argument("--rows", nargs="+", metavar="NAME", help="the numbers themselves, of names or patterns")
    how.add_argument("--follow", action="store_true", help="show the last run, or those that are named, as they go on")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON; NaN and infinities are strings in it")
    form.add_argument("--csv", action="store_true", help="print the rows of --rows as CSV")


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    directories, names = _places_and_names(arguments.what)
    patterns = arguments.metric or ["*"]
    files, errors = runs_below(directories, _metrics_to_read(arguments))
    where = [Condition.parse(text) for text in arguments.where]
    all_runs = brought_together(files)
    runs = chosen(all_runs, names, where, arguments.state) if all_runs else []
    runs = runs[-1:] if arguments.last or (arguments.follow and not names) else runs
    if arguments.sort:
        runs = ordered(runs, arguments.sort, reverse=arguments.reverse)
    elif arguments.reverse:
        runs = runs[::-1]
    if arguments.follow:
        begun = [] if names else just_begun([path for path, _ in errors], runs)
        ids = begun or [run.id for run in runs]
        runs = follow(directories, ids, patterns, console()) if ids else runs
        all_runs, errors = all_runs or runs, [error for error in errors if not _is_of(error[0], runs)]
    if arguments.rows:
        print_rows(runs, arguments.rows, "csv" if arguments.csv else "json" if arguments.json else "table")
    elif arguments.json:
        unreadable = [{"path": str(path), "reason": str(error)} for path, error in errors]
        found = [_run_as_json(run, patterns) for run in runs]
        print_json({"directories": list(map(str, directories)), "runs": found, "unreadable": unreadable})
    else:
        is_table = arguments.compare or (len(runs) > _MOST_CARDS and not arguments.details)
        _print(console(), runs, arguments.metric, is_table=is_table)
        _print_end(console(), directories, runs, len(all_runs), errors)
    if not all_runs:
        below = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(f"None of the runs below {below} could be read: the reasons are above.")
    return 1 if errors else 0


def _is_of(path: Path, runs: Sequence[LocalRun]) -> bool:
    return any(path in run.files for run in runs)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.csv and not arguments.rows:
        raise ConfigurationError("--csv is for rows. Say which ones: --rows NAME... --csv")
    if arguments.follow and arguments.json:
        raise ConfigurationError("--follow prints no JSON. Leave out one of the two.")


def _places_and_names(what: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The directories, and the ids and names of runs."""
    directories = [Path(text) for text in what if _is_path(text)]
    names = [text for text in what if not _is_path(text)]
    directories = directories or usual_directories()
    if not directories:
        missing = f"There is no directory {names[0]!r}. " if names else ""
        raise ReadError(
            f"{missing}No directory to look in was given, and there is none of ./wandb, $WANDB_DIR and "
            "./lightning_logs. Give the directory that W&B wrote to."
        )
    return directories, names


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".wandb") or Path(text).exists()


def _metrics_to_read(arguments: argparse.Namespace) -> Sequence[str]:
    """The metrics that statistics are needed of."""
    if arguments.where or arguments.sort:
        return ["*"]
    return arguments.metric or (["*"] if not arguments.rows else arguments.rows)


def _print(out: Console, runs: Sequence[LocalRun], patterns: Sequence[str] | None, *, is_table: bool) -> None:
    if is_table and runs:
        out.print(runs_table(runs, patterns))
        for run in runs:
            for problem in run.problems:
                out.print(Text(f"! {visible(run.id)}: {visible(problem)}", "yellow"), soft_wrap=True)
        out.print()
        return
    for run in runs:
        heading, metrics = card(run, patterns or ["*"], out.width)
        out.print(heading, soft_wrap=True)
        out.print(metrics)
        out.print()


def _print_end(
    out: Console,
    directories: Sequence[Path],
    runs: Sequence[LocalRun],
    number_of_all: int,
    errors: Sequence[tuple[Path, ReadError]],
) -> None:
    """The files that cannot be read, and a line that counts the runs."""
    for _, error in errors:
        out.print(Text.assemble(("✗ not readable  ", "red"), str(error), "\n"), soft_wrap=True)
    files = sum(len(run.files) for run in runs)
    in_files = "" if files == len(runs) else f" in {files} files"
    of_all = "" if len(runs) == number_of_all else f" of {number_of_all}"
    states = [run.state for run in runs]
    parts = [f"{states.count(state)} {words}" for state, (_, words) in STATES.items() if state in states]
    parts += [f"{number_of(len(errors), 'file')} not readable"] if errors else []
    below = ", ".join(visible(str(directory)) for directory in directories)
    counted = f"{number_of(len(runs), 'run')}{of_all}{in_files} below {below}"
    out.print(Text(": ".join([counted, ", ".join(parts)]) if parts else counted), soft_wrap=True)


def _run_as_json(run: LocalRun, patterns: Sequence[str]) -> dict[str, Any]:
    parts = [part for writer in run.writers for part in writer.parts]
    own = (
        "name",
        "project",
        "group",
        "job_type",
        "tags",
        "config",
        "started",
        "state",
        "exit_code",
        "rows",
        "step_axis",
    )
    return {
        "run_id": run.id,
        **{name: getattr(run, name) for name in own},
        "path": str(run.writers[0].path),
        "uploaded": all(map(is_uploaded, parts)),
        "problems": run.problems,
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
            name: {**asdict(metric), "trend": shortened(metric.trend, SPARKLINE_WIDTH)}
            for name, metric in matching(run.metrics, patterns).items()
        },
    }


COMMAND = Command(
    name="show",
    summary="print the W&B runs below a directory",
    description="Print the W&B runs below a directory: their writers, how they ended, and the last, smallest and "
    "largest value of each metric. Many runs are a table. Nothing is uploaded or changed. Exit code 1 if a run cannot "
    "be read.",
    example="wandb --last --metric 'val/*'",
    add_arguments=_add_arguments,
    run=_run,
)
