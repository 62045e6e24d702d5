"""What the commands share: their description and arguments, and the format of their output.

The output consists of tables, numbers, sparklines and JSON.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, get_args

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from dist_wandb.errors import ReadError
from dist_wandb.runs.client_settings import TRUST_OPTION, is_address, usual_directories
from dist_wandb.wandb_files.reading import State, trend_of
from dist_wandb.wandb_files.runs import LocalRun, parts_of
from dist_wandb.wandb_files.selection import chosen

_BLOCKS = "▁▂▃▄▅▆▇█"
_GAP = "·"


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, summary: str, about: str, example: str
) -> argparse.ArgumentParser:
    """Add a command to what `add_subparsers` has returned; return its parser. `run` returns the exit code."""
    epilog = f"Example: dist-wandb {name} {example}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=about, epilog=epilog)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_secrets_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--secrets", action="store_true", help="show values of the config that are secrets by name, such as a token"
    )


def add_selection_arguments(parser: argparse.ArgumentParser) -> Any:
    parser.add_argument(
        "what",
        metavar="DIR|RUN",
        nargs="*",
        help="directories to search, at any depth, or .wandb files (default: ./wandb, $WANDB_DIR and "
        "./lightning_logs); and ids, names or patterns of runs",
    )
    selection = parser.add_argument_group("which runs")
    selection.add_argument("--last", action="store_true", help="only the run that was started last")
    selection.add_argument(
        "--state", choices=get_args(State), help="only runs that ended in this way; unfinished: no end recorded"
    )
    selection.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only runs with such a value in their config, or such a last value of a metric: 'lr>=0.1', 'name=night*'; "
        "may be given several times",
    )
    return selection


def directories_and_names(what: Sequence[str]) -> tuple[list[Path], list[str]]:
    directories = [Path(text) for text in what if _is_path(text)]
    names = [text for text in what if not _is_path(text)]
    directories = directories or usual_directories()
    if not directories:
        missing = f"There is no directory {names[0]!r}. " if names else ""
        raise ReadError(
            f"{missing}No directory was given, and none of ./wandb, $WANDB_DIR and ./lightning_logs exists. Give the "
            "directory that W&B wrote to."
        )
    return directories, names


def _is_path(text: str) -> bool:
    return "/" in text or text.endswith(".wandb") or Path(text).exists()


def selected(runs: Sequence[LocalRun], names: Sequence[str], arguments: argparse.Namespace) -> list[LocalRun]:
    found = chosen(runs, names, arguments.where, arguments.state)
    # A run that was resumed has several starts, of which `LocalRun.started` is the first.
    in_order = sorted(found, key=lambda run: max(part.started or "" for part in parts_of(run)))
    return in_order[-1:] if arguments.last else found


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
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


def console() -> Console:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every stream can show the blocks of a sparkline
    found = Console()
    if not found.is_terminal:
        found.width = 10_000  # nothing is cut
    return found


def working(what: str) -> AbstractContextManager[object]:
    """Show on stderr, if it is a terminal, that the block is at work."""
    is_shown = sys.stderr is not None and sys.stderr.isatty()  # rich would also believe FORCE_COLOR
    return Console(stderr=True).status(f"{what} ...") if is_shown else nullcontext()


def table() -> Table:
    return Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="dim",
        border_style="dim",
    )


class Column(NamedTuple):
    """A column of a table that fits the terminal; its cells are never broken."""

    title: str
    cells: Sequence[Text]
    rank: int = 0  # where not all fit, those with smaller ranks come first; 0: shown in any case
    justify: JustifyMethod = "right"
    width: int | None = None  # the default is that of the longest cell; longer cells are folded

    @property
    def room(self) -> int:
        """Its width, with the gap beside it."""
        return 2 + (self.width or max(cell_len(self.title), *(cell.cell_len for cell in self.cells), 0))


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[Text]]:
    """Return the columns that fit into `width`, and the line that names the others, if there are any."""
    shown: set[int] = set()  # by place
    for place in sorted(range(len(columns)), key=lambda place: columns[place].rank):
        if not columns[place].rank or sum(columns[one].room for one in (*shown, place)) - 2 <= width:
            shown.add(place)
    titles = [column.title for place, column in enumerate(columns) if place not in shown]
    left_out = [Text(f"left out, as the terminal is too narrow: {', '.join(titles)}", "dim")] if titles else []
    return [columns[place] for place in sorted(shown)], left_out


def table_of(columns: Sequence[Column]) -> Table:
    shown = table()
    shown.width = sum(column.room for column in columns) - 2  # also if it does not fit: nothing is cut
    for column in columns:
        options: dict[str, Any] = {"no_wrap": column.width is None, "overflow": "fold", "min_width": column.room - 2}
        shown.add_column(Text(column.title), justify=column.justify, **options)
    for cells in zip(*(column.cells for column in columns), strict=True):
        shown.add_row(*cells)
    return shown


def number(value: float) -> str:
    """Format a number in few digits; integers in full."""
    if math.isnan(value):
        return "NaN"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:  # noqa: PLR2004  # digits a float holds
        return str(int(value))
    return f"{value:.5g}"


def number_of(count: int, noun: str) -> str:
    """Format a count with its noun: ``"no rows"``, ``"1 row"``, ``"2 rows"``."""
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def print_json(value: Any, shown: Callable[[str], str] = str) -> None:
    """Print a value as JSON. `shown` is applied to each text, except names."""
    print(json.dumps(_json_value(value, shown), indent=2, allow_nan=False))


def _json_value(value: Any, shown: Callable[[str], str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no numbers for them
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _json_value(item, shown) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item, shown) for item in value]
    return shown(value) if isinstance(value, str) else value


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a series, oldest value first, between its smallest and its largest value, as at most `width` characters."""
    series = trend_of(values, width)
    halves = [value / 2 for value in series if math.isfinite(value)]  # the difference of two floats may overflow
    low, high = min(halves, default=0.0), max(halves, default=0.0)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return _GAP
        if low == high:
            return _BLOCKS[len(_BLOCKS) // 2 - 1]
        return _BLOCKS[min(int((value / 2 - low) / (high - low) * len(_BLOCKS)), len(_BLOCKS) - 1)]

    return "".join(map(block, series))
