"""The contents of a report as plain data. `page.py` writes them into the page as JSON, under these names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

_DIGITS_OF_X = 12
_DIGITS = 6

State = Literal["finished", "failed", "unfinished"]


@dataclass(frozen=True)
class Line:
    """A curve.

    Args:
        x: Positions on the x axis, ascending.
        y: The values at these positions.
    """

    x: list[float]
    y: list[float]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Line:
        """Return the curve through points, with only the digits that are visible in a chart."""
        pairs = [(shortened(x, _DIGITS_OF_X), shortened(y, _DIGITS)) for x, y in points]
        return cls([x for x, _ in pairs], [y for _, y in pairs])


@dataclass(frozen=True)
class Chart:
    """One metric of one run.

    Args:
        name: Name of the metric.
        axis: Name of its x axis.
        line: The reduced values, or the mean of the ranks' lines; `None` if there are neither.
        band: The smallest and the largest values of the ranks.
        ranks: The line of each rank (or of a part of it, such as a GPU) by its name.
        last: The last value of `line`, or of the first rank.
        least: The smallest value that is finite.
        most: The largest value that is finite.
        gaps: Number of values that are not finite.
        thinned: Whether the lines have fewer points than were logged.
    """

    name: str
    axis: str
    line: Line | None
    band: tuple[Line, Line] | None = None
    ranks: dict[str, Line] = field(default_factory=dict)
    last: float = math.nan
    least: float = math.nan
    most: float = math.nan
    gaps: int = 0
    thinned: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A number for each rank and part of the x axis.

    Args:
        name: Name of the metric.
        kind: `"excess"`: by how much the largest value exceeded the mean over all ranks, per row, counted only for the
            rank with that value; `"value"`: the mean of each rank's own values.
        axis: Name of the x axis.
        ranks: Names of the ranks, from top to bottom.
        edges: Start of the first part of the x axis, and the end of each part.
        cells: The numbers of each rank from left to right; `None` for a part without values.
    """

    name: str
    kind: Literal["excess", "value"]
    axis: str
    ranks: list[str]
    edges: list[float]
    cells: list[list[float | None]]


@dataclass(frozen=True)
class Slowest:
    """The rank that most often has the largest value of a metric.

    Args:
        name: Name of the metric.
        rank: Global rank.
        share: Share of the rows in which it has the largest value, from 0 to 1.
        excess: By how much its value exceeds the mean over all ranks in these rows, on average.
        relative: `excess` as a share of that mean; NaN if the mean is not known.
        stands_out: Whether this is more than chance explains.
    """

    name: str
    rank: int
    share: float
    excess: float
    relative: float
    stands_out: bool


@dataclass(frozen=True)
class Writer:
    """One file of a run, as one process wrote it.

    Args:
        name: Name in the page, such as ``"rank 3"``.
        label: Name of the writer in a shared run.
        run_id: Id of the run.
        rank: Global rank, if known.
        node: Rank of the node, if known.
        primary: Whether the writer writes the plain names.
        state: How the writer ended.
        exit_code: Exit code of the writer, if recorded.
        rows: Number of history rows.
        last: Last position on the x axis; NaN if there are no rows.
        uploaded: Whether the file is uploaded.
        directory: Path of the run's directory.
        problems: Parts of the file that are unreadable or left out, each as a sentence fragment.
    """

    name: str
    label: str | None
    run_id: str
    rank: int | None
    node: int | None
    primary: bool
    state: State
    exit_code: int | None
    rows: int
    last: float
    uploaded: bool
    directory: str
    problems: list[str]


@dataclass(frozen=True)
class Degraded:
    """Rows to which some ranks did not contribute.

    Args:
        rows: Number of these rows.
        most: Largest number of missing ranks.
        spans: First and last position on the x axis of each stretch of consecutive such rows.
    """

    rows: int
    most: int
    spans: list[tuple[float, float]]


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
    """A run of W&B, or the runs of a job that has one for each rank.

    Args:
        name: Name in the page.
        run_id: Id of the run, or name of the job's group.
        project: Project of the run.
        group: Group of the run.
        job_type: Job type of the run.
        tags: Tags of the run.
        started: Start time of the first writer (ISO 8601, UTC).
        state: Failed if one writer failed, else unfinished if the end of one is not recorded.
        mode: dist_wandb's run mode and rank scope, such as ``"shared/global"``; empty for an ordinary run.
        world: Number of ranks of the job, if known.
        rows: Number of history rows of all writers.
        uploaded: Number of writers whose files are uploaded.
        writers: The files of the run.
        degraded: Rows to which some ranks did not contribute.
        config: Names and values, as text.
        differing: Names of the config whose values differ between writers.
        charts: Charts of the metrics.
        system: Charts of the system metrics, over minutes.
        heat: Heat maps.
        slowest: The slowest rank of each timing metric with values or a spread of the ranks, the most important first.
        images: Logged images.
        tables: Logged tables.
        console: Console output of each process.
        notes: Contents of the run that the page leaves out.
    """

    name: str
    run_id: str
    project: str | None
    group: str | None
    job_type: str | None
    tags: list[str]
    started: str | None
    state: State
    mode: str
    world: int | None
    rows: int
    uploaded: int
    writers: list[Writer]
    degraded: Degraded
    config: dict[str, str]
    differing: list[str]
    charts: list[Chart]
    system: list[Chart]
    heat: list[HeatMap]
    slowest: list[Slowest]
    images: list[Image]
    tables: list[Table]
    console: list[Console]
    notes: list[str]


@dataclass(frozen=True)
class Report:
    """All contents of a page.

    Args:
        directory: Path of the directory that contains the runs.
        made: Time at which the report was made (ISO 8601).
        version: Version of dist_wandb.
        runs: The runs, sorted by project and group, newest first within each group.
        unreadable: The reasons why files could not be read.
    """

    directory: str
    made: str
    version: str
    runs: list[Run]
    unreadable: list[str]


def shortened(value: float, digits: int = _DIGITS) -> float:
    """Round a number to `digits` significant digits; an integer is kept in full."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}")
