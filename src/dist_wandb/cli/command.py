"""The description of a command, arguments that several commands take, and the runs that they read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dist_wandb.errors import ReadError
from dist_wandb.runs.destination import TRUST_OPTION, is_address
from dist_wandb.wandb_files.finding import find_runs
from dist_wandb.wandb_files.reading import StoredRun, read_runs


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Args:
        name: Its name.
        summary: What it does, in one line.
        description: What it does, and its exit code.
        example: Arguments of an example.
        add_arguments: Adds its arguments to a parser.
        run: Runs it; returns the exit code.
    """

    name: str
    summary: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-server``."""
    parser.add_argument(
        TRUST_OPTION,
        type=_address,
        metavar="URL",
        help="send the API key to this server, even if only the settings file of the current directory names it, or "
        "over plain http",
    )


def runs_below(
    directories: Sequence[Path], metrics: Sequence[str] = ("*",)
) -> tuple[list[StoredRun], list[tuple[Path, ReadError]]]:
    """Read the runs below directories; return them, and why files and directories could not be read."""
    files: dict[Path, Path] = {}  # by resolved path: each file once
    unseen: list[tuple[Path, ReadError]] = []
    for directory in directories:
        errors: list[ReadError] = []
        found = find_runs(directory, report=errors.append)
        files.update({path.parent.resolve() / path.name: path for path in found})
        unseen += [(directory, error) for error in errors]
    if not files and not unseen:
        where = " or ".join(repr(str(directory)) for directory in directories)
        raise ReadError(
            f"No W&B run lies below {where}: there is no run-*.wandb file in a run-* or offline-run-* directory. Give "
            "the directory that W&B wrote to (`dir=`, by default ./wandb)."
        )
    runs, unreadable = read_runs(files.values(), metrics=metrics)
    return runs, [*unreadable.items(), *unseen]


def _address(text: str) -> str:
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a server, such as https://wandb.example")
    return text
