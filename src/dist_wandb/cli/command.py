"""The description of a command, and arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from dist_wandb.runs.destination import TRUST_OPTION, is_address


@dataclass(frozen=True)
class Command:
    """One command of the command line. `example` has the arguments of an example; `run` returns the exit code."""

    name: str
    summary: str
    description: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_secrets_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--secrets``."""
    parser.add_argument(
        "--secrets", action="store_true", help="show values of the config that are secrets by name, such as a token"
    )


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--trust-server``."""
    parser.add_argument(
        TRUST_OPTION,
        type=_address,
        metavar="URL",
        help="send the API key to this server, even if only the settings file of the current directory names it, or "
        "over plain http",
    )


def _address(text: str) -> str:
    if not is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the address of a server, such as https://wandb.example")
    return text
