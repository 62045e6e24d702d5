"""The contents of a report as plain data, and text that a page can show: the last lines that a process printed.

`page.py` writes the data into the page as JSON, under these names.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from dist_wandb.wandb_files.reading import State

DIGITS_OF_X = 12  # number of significant digits of a position on an x axis
_DIGITS = 6

_MOST_LINES = 1000
_LONGEST_LINE = 500  # characters
_LONGEST_PENDING = 64 * 1024
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,1000}(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Line:
    """A curve."""

    x: list[float]  # positions on the x axis, ascending
    y: list[float]  # the values at these positions

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]], digits: int = _DIGITS) -> Line:
        """Return the curve through points, with only the digits that are visible in a chart."""
        pairs = [(shortened(x, DIGITS_OF_X), shortened(y, digits)) for x, y in points]
        return cls([x for x, _ in pairs], [y for _, y in pairs])


@dataclass(frozen=True)
class Chart:
    """One metric of one run."""

    name: str
    axis: str
    line: Line | None  # the reduced values, or the mean of the ranks' lines; `None` if there are neither
    band: tuple[Line, Line] | None = None  # the smallest and the largest values of the ranks
    ranks: dict[str, Line] = field(default_factory=dict)  # by name, the line of each rank or of a part of it (a GPU)
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
    """The rank that most often has the largest value of a metric."""

    name: str
    rank: int
    share: float  # share of the rows in which it has the largest value, from 0 to 1
    excess: float  # by how much its value exceeds the mean over all ranks in these rows, on average
    relative: float  # `excess` as a share of that mean; NaN if the mean is not known
    stands_out: bool  # whether it delays the others, or differs from them more often than by chance, and noticeably
    by_chance: bool  # whether chance explains how often it has the largest value


@dataclass(frozen=True)
class Writer:
    """One file of a run, as one process wrote it."""

    name: str  # name in the page, such as ``"rank 3"``
    label: str | None  # name of the writer in a shared run
    run_id: str
    rank: int | None  # global rank, if known
    node: int | None  # rank of the node, if known
    primary: bool  # whether the writer writes the plain names
    state: State  # how the writer ended
    exit_code: int | None  # exit code of the writer, if recorded
    rows: int
    last: float  # last position on the x axis; NaN if there are no rows
    uploaded: bool
    directory: str  # path of the run's directory
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
class Table:
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
    state: State  # failed if one writer failed, else unfinished if the end of one is not recorded
    mode: str  # dist_wandb's run mode and rank scope, such as ``"shared/global"``; empty for an ordinary run
    world: int | None  # number of ranks of the job, if known
    rows: int  # number of history rows of all writers
    writers: list[Writer]  # the files of the run
    degraded: Degraded  # rows to which some ranks did not contribute
    facts: dict[str, str]  # such as tags, notes, host, command and commit, as text
    config: dict[str, str]  # names and values, as text
    differing: list[str]  # names of facts and config whose values differ between writers
    axes: dict[str, Line]  # over ``_step``, the values of each other x axis; ``_timestamp`` in minutes since the start
    charts: list[Chart]  # charts of the metrics
    system: list[Chart]  # charts of the system metrics, over minutes
    heat: list[HeatMap]
    slowest: list[Slowest]  # the slowest rank of each timing metric, the most important metric first
    findings: list[str]  # what `reading.stragglers.findings` says of the timings
    images: list[Image]
    tables: list[Table]
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
    """Round a number to `digits` significant digits; an integer is kept in full."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}")


class ConsoleTail:
    """Assembles pieces of console output into lines, as a terminal without colors would show them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.count: int = 0  # number of all lines, including those that were dropped
        self._pending = ""

    def add(self, text: str) -> None:
        """Add a piece, which may start and end in the middle of a line."""
        *ended, self._pending = (self._pending + text).split("\n")
        if len(self._pending) > _LONGEST_PENDING:
            ended.append(self._pending)
            self._pending = ""
        for line in ended:
            self._put(line)

    def end(self) -> None:
        """Add an incomplete last line."""
        if self._pending:
            self._put(self._pending)
        self._pending = ""

    def _put(self, line: str) -> None:
        self.count += 1
        self.lines.append(plain(line.rstrip("\r").rpartition("\r")[2])[:_LONGEST_LINE])


def plain(text: str) -> str:
    """Return a text without escape sequences; control characters are replaced by U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", _ESCAPE.sub("", text))
