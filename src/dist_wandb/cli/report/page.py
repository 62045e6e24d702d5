"""The page of a report: its contents as plain data, and how they become one HTML file that makes no network request.

The data, from files, is JSON in an element that is not executed, under the names of the classes' fields; the page's
script turns it into text nodes, never HTML. A content security policy lists the hashes of the two scripts: nothing else
runs, and no connection can be opened.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from dist_wandb.errors import MissingExtraError, ReadError
from dist_wandb.wandb_files.reading import State
from dist_wandb.wandb_files.records import whole
from dist_wandb.wandb_files.small_files import open_ordinary, write_small

LARGEST = 20 * 10**6  # largest size of a page, in bytes
MARK = b'<meta name="generator" content="dist-wandb report '  # identifies a page: no other file is replaced
_SCRIPTS = ("values.js", "dom.js", "charts.js", "ranks.js", "compare.js", "details.js", "main.js")
_MARK_WITHIN = 4096  # first bytes of a file, in which the mark must be
DIGITS_OF_X = 12  # number of significant digits of a position on an x axis
_DIGITS = 6

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class ChartLine:
    """A curve."""

    x: list[float]  # positions on the x axis, ascending
    y: list[float]  # the values at these positions

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]], digits: int = _DIGITS) -> ChartLine:
        """Return the curve through points, with only the digits that are visible in a chart."""
        pairs = [(shortened(x, DIGITS_OF_X), shortened(y, digits)) for x, y in points]
        return cls([x for x, _ in pairs], [y for _, y in pairs])


@dataclass(frozen=True)
class Chart:
    """One metric of one run."""

    name: str
    axis: str
    line: ChartLine | None  # the reduced values, or the mean of the ranks' lines; `None` if there are neither
    band: tuple[ChartLine, ChartLine] | None = None  # the smallest and the largest values of the ranks
    # by name, the line of each rank or of a part of it (a GPU)
    ranks: dict[str, ChartLine] = field(default_factory=dict)
    last: float = math.nan  # the last value of `line`, or of the first rank
    least: float = math.nan  # the smallest value that is finite
    most: float = math.nan  # the largest value that is finite
    gaps: int = 0  # number of values that are not finite
    thinned: bool = False  # whether the lines have fewer points than were logged


@dataclass(frozen=True)
class HeatMap:
    """A number for each rank and part of the x axis.

    `"excess"`: by how much the largest value exceeded the mean over all ranks, per row, counted only for the rank with
    that value. `"value"`: the mean of each rank's own values.
    """

    name: str
    kind: Literal["excess", "value"]
    axis: str
    ranks: list[str]  # names of the ranks, from top to bottom
    edges: list[float]  # start of the first part of the x axis, and the end of each part
    cells: list[list[float | None]]  # the numbers of each rank from left to right; `None` for a part without values


@dataclass(frozen=True)
class Slowest:
    """The ranks that have the largest value of a metric too often for chance, else the one that has it most often."""

    name: str
    ranks: list[int]
    who: str  # these, in words
    share: float  # share of the rows in which one of them has the largest value, from 0 to 1
    excess: float  # by how much this exceeds the mean over all ranks in these rows, on average
    relative: float  # `excess` as a share of that mean; NaN if the mean is not known
    stands_out: bool  # whether they delay the others, or differ from them more often than by chance, and noticeably
    by_chance: bool  # whether chance explains how often it has the largest value


@dataclass(frozen=True)
class ReportWriter:
    """One file of a run, as one process wrote it."""

    name: str  # name in the page, such as ``"rank 3"``
    label: str | None  # name of the writer in a shared run
    node: int | None  # rank of the node, if known
    primary: bool  # whether the writer writes the plain names
    state: State  # how the writer ended
    exit_code: int | None  # exit code of the writer, if recorded
    rows: int
    last: float  # last position on the x axis; NaN if there are no rows
    uploaded: bool
    problems: list[str]  # stalls, and parts of the file that are unreadable or left out, as sentence fragments


@dataclass(frozen=True)
class Degraded:
    """Rows to which some ranks did not contribute."""

    rows: int
    most: int  # largest number of missing ranks
    spans: list[tuple[float, float]]  # first and last position on the x axis of each stretch of consecutive such rows


@dataclass(frozen=True)
class Image:
    """A logged image. `source` is a data URI of checked bytes."""

    name: str
    step: float
    source: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class DataTable:
    """A logged table. `rows` are the first of `total` rows, as text."""

    name: str
    step: float
    columns: list[str]
    rows: list[list[str]]
    total: int


@dataclass(frozen=True)
class Console:
    """The last lines that a process printed. `dropped` is the number of lines before them."""

    writer: str
    lines: list[str]
    dropped: int


@dataclass(frozen=True)
class Run:
    """A run of W&B, or the runs of a job that has one for each rank."""

    name: str  # name in the page
    run_id: str  # id of the run, or name of the job's group
    project: str | None
    group: str | None
    started: str | None  # start time of the first writer (ISO 8601, UTC)
    state: State  # failed if one writer failed at last, else unfinished if the last end of one is not recorded
    mode: str  # dist_wandb's run mode and rank scope, such as ``"shared/global"``; empty for an ordinary run
    world: int | None  # number of ranks of the job, if known
    rows: int  # number of history rows of all writers
    writers: list[ReportWriter]  # the files of the run
    degraded: Degraded  # rows to which some ranks did not contribute
    facts: dict[str, str]  # such as tags, notes, host, command and commit, as text
    config: dict[str, str]  # names and values, as text
    differing: list[str]  # names of facts and config whose values differ between writers
    axes: dict[
        str, ChartLine
    ]  # over ``_step``, the values of each other x axis; ``_timestamp`` in minutes since the start
    charts: list[Chart]  # charts of the metrics
    system: list[Chart]  # charts of the system metrics, over minutes
    heat: list[HeatMap]
    slowest: list[Slowest]  # the slowest rank of each timing metric, the most important metric first
    findings: list[str]  # what `stragglers.findings` says of the timings
    images: list[Image]
    tables: list[DataTable]
    console: list[Console]  # console output of each process
    notes: list[str]  # contents of the run that the page leaves out


@dataclass(frozen=True)
class Report:
    """All contents of a page."""

    directories: list[str]  # paths of the directories that contain the runs
    made: str  # time at which the report was made (ISO 8601)
    version: str
    runs: list[Run]  # the runs, sorted by project and group, newest first within each group
    unreadable: list[str]  # the reasons why files could not be read


def shortened(value: float, digits: int = _DIGITS) -> float:
    return float(f"{value:.{digits}g}") if value % 1 else whole(value)  # an integer is kept


def plain(text: str) -> str:
    """Return a text without escape sequences; control characters are replaced by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", text))


def write_page(report: Report, path: Path) -> int:
    check_target(path)
    content = page_of(report, plotly_script())
    write_small(path, content, mode=0o666)
    return len(content)


def check_target(path: Path) -> None:
    """Raise `ReadError` if the path is a file that is not a report, and `OSError` if its directory does not exist."""
    try:
        with open(open_ordinary(path), "rb") as opened:  # noqa: PTH123  # of a descriptor
            is_page = MARK in opened.read(_MARK_WITHIN)
    except FileNotFoundError:
        path.parent.stat()
        return
    if not is_page:
        raise ReadError(f"{path} exists and is not a dist-wandb report, so it is not replaced. Give another -o FILE.")


def plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError:
        raise MissingExtraError(
            "The report needs plotly, which is not installed. Install it: pip install 'dist-wandb[report]'"
        ) from None
    return _as_element_text(get_plotlyjs())


def page_of(report: Report, plotly: str) -> bytes:
    script = _as_element_text("".join(f"{_asset(name)}\n" for name in _SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "VERSION": escape(report.version),
        "TITLE": escape(f"{', '.join(Path(one).name or one for one in report.directories)} - dist-wandb report"),
        "STYLE": _as_element_text(_asset("page.css")),
        "DATA": json_of(report),
        "PLOTLY": plotly,
        "SCRIPT": script,
    }
    text = _asset("page.html")
    pieces = []
    for name, part in parts.items():  # each once, in this order; inserted text is not searched again
        before, _, text = text.partition(f"%{name}%")
        pieces += [before, part]
    page = "".join([*pieces, text]).encode("utf-8", "replace")
    if len(page) > LARGEST:
        raise ReadError(
            "The report would be too large, even with few points. Give a narrower directory or use --metric."
        )
    return page


def json_of(report: Report) -> str:
    """Return a report as JSON that is safe within HTML. NaN and infinities become null."""
    text = json.dumps(_plain(report), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _asset(name: str) -> str:
    return resources.files(__package__ or "dist_wandb.cli.report").joinpath(name).read_text(encoding="utf-8")


def _as_element_text(script: str) -> str:
    """Escape a script or style so that no HTML parser ends it early, and its hash is that of the parsed text."""
    script = re.sub(r"<(/script|/style|!--)", r"<\\\1", script, flags=re.IGNORECASE)
    return script.replace("\r\n", "\n").replace("\r", "\n")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
