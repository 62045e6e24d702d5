"""``dist-wandb report``: write the W&B runs below a directory into one HTML file."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from dist_wandb.cli.command import (
    Command,
    add_secrets_argument,
    add_selection_arguments,
    directories_and_names,
    number_of,
    selected,
    working,
)
from dist_wandb.cli.report.building import build
from dist_wandb.cli.report.page import check_target, plotly_script, write_page
from dist_wandb.errors import ReadError, visible


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_selection_arguments(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default="report.html", help="the file to write (%(default)s)"
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="GLOB",
        help="only metrics whose name matches, such as 'val/*'; may be given several times",
    )
    add_secrets_argument(parser)


def _run(arguments: argparse.Namespace) -> int:
    output: Path = arguments.output
    directories, names = directories_and_names(arguments.what)
    is_selective = names or arguments.last or arguments.state or arguments.where
    choose = (lambda runs: selected(runs, names, arguments)) if is_selective else None
    plotly_script()  # fails before the runs are read, which may take long
    try:
        check_target(output)
        with working("reading the runs"):
            metrics, by_values = arguments.metric or ("*",), bool(arguments.where)
            report = build(directories, metrics, secrets=arguments.secrets, choose=choose, by_values=by_values)
            size = write_page(report, output)
    except OSError as error:
        raise ReadError(f"{output} cannot be written: {error.strerror or error}. Give another -o FILE.") from None
    for reason in report.unreadable:
        print(f"not readable: {visible(reason)}")
    print(f"{number_of(len(report.runs), 'run')} in {visible(str(output))} ({size / 1e6:.1f} MB)")
    if arguments.open and not webbrowser.open(output.resolve().as_uri()):
        print("No browser could be started. Open the file in a browser.")
    return 1 if report.unreadable else 0


COMMAND = Command(
    name="report",
    summary="write W&B runs into one HTML file that compares them",
    description="Write the W&B runs below directories into one HTML file that needs no network: a table that compares "
    "the runs, curves with the ranks' spread, who is slow and when, system metrics, config, media and console. Needs "
    "plotly: pip install 'dist-wandb[report]'. Nothing is uploaded or changed. Exit code 1 if a run cannot be read.",
    example="wandb --where 'lr>=0.1' --open",
    add_arguments=_add_arguments,
    run=_run,
)
