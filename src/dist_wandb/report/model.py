"""What a report shows, as plain data: `page.py` writes it into the page as JSON, under these names."""

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
        x: Places on the x axis, ascending.
        y: The values at these places.
    """

    x: list[float]
    y: list[float]

    @classmethod
    def of(cls, points: Iterable[tuple[float, float]]) -> Line:
        """A curve through points, in as many digits as can be seen."""
        pairs = [(shortened(x, _DIGITS_OF_X), shortened(y, _DIGITS)) for x, y in points]
        return cls([x for x, _ in pairs], [y for _, y in pairs])


@dataclass(frozen=True)
class Chart:
    """One metric of one run.

    Args:
        name: Name of the metric.
        axis: Name of its x axis.
        line: The reduced numbers, or the mean of the ranks' lines; `None` if there are neither.
        band: The ranks' smallest, and their largest numbers.
        ranks: By name of a rank (or of a part of one, such as a GPU) its own line.
        last: The last value of `line`, or of the first rank.
        least: The smallest value that is finite.
        most: The largest value that is finite.
        gaps: Number of values that are not finite.
        thinned: Whether lines have fewer points than were logged.
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
        name: The metric that it is about.
        kind: `"excess"`: how much larger than the mean of all the number of the rank with the largest one was, per row,
            counted for that rank alone; `"value"`: the mean of each rank's own numbers.
        axis: Name of the x axis.
        ranks: Names of the ranks, from top to bottom.
        edges: Begin, and ends, of the parts of the x axis.
        cells: For each rank the numbers from left to right; `None` where there is none.
    """

    name: str
    kind: Literal["excess", "value"]
    axis: str
    ranks: list[str]
    edges: list[float]
    cells: list[list[float | None]]


@dataclass(frozen=True)
class Slowest:
    """A rank that holds the others up.

    Args:
        name: The metric that it is about.
        rank: The rank.
        share: In which share of the rows it has the largest number.
        excess: By how much its number exceeds the mean of all then, on average.
        relative: The same, as a share of that mean; NaN if the mean is not known.
        stands_out: Whether chance does not explain it.
    """

    name: str
    rank: int
    share: float
    excess: float
    relative: float
    stands_out: bool


@dataclass(frozen=True)
class Writer:
    """One file of a run: what one process wrote.

    Args:
        name: What the page calls it, such as ``"rank 3"``.
        label: Its name in a shared run.
        run_id: Id of its run.
        rank: Its global rank, if known.
        node: The rank of its node, if known.
        primary: Whether it writes the plain names.
        state: How it ended.
        exit_code: Its exit code, if recorded.
        rows: Number of history rows.
        last: The last place on the x axis; NaN if there is none.
        uploaded: Whether it is uploaded.
        directory: Where it lies.
        problems: Unreadable and left out parts, each as a sentence fragment.
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
    """Rows that some ranks have no part in.

    Args:
        rows: How many there are.
        most: How many ranks are missing at most.
        spans: First and last place on the x axis of stretches of such rows.
    """

    rows: int
    most: int
    spans: list[tuple[float, float]]


@dataclass(frozen=True)
class Image:
    """A picture that was logged. `source` is a data URI of checked bytes."""

    name: str
    step: float
    source: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Table:
    """A table that was logged; `rows` are the first of `total`, as text."""

    name: str
    step: float
    columns: list[str]
    rows: list[list[str]]
    total: int


@dataclass(frozen=True)
class Console:
    """The last lines that a process printed; `dropped` counts those before."""

    writer: str
    lines: list[str]
    dropped: int


@dataclass(frozen=True)
class Run:
    """A run of W&B, or the runs of a job that has one for each rank.

    Args:
        name: What the page calls it.
        run_id: Its id, or the group's name.
        project: Its project.
        group: Its group.
        job_type: Its job type.
        tags: Its tags.
        started: When the first writer started (ISO 8601, UTC).
        state: How it ended: failed if one writer failed, else unfinished if one has no end.
        mode: dist_wandb's run mode and rank scope, such as ``"shared/global"``; empty for an ordinary run.
        world: Number of ranks of the job, if known.
        rows: Number of history rows of all writers.
        uploaded: How many writers' files are uploaded.
        writers: Its files.
        degraded: Rows that some ranks have no part in.
        config: Names and values, as text.
        differing: Names of the config whose values differ between its writers.
        charts: Its metrics.
        system: Its system metrics, over minutes.
        heat: Its heat maps.
        slowest: Of each metric that has the ranks' spread, the rank with the largest numbers; most telling first.
        images: Its pictures.
        tables: Its tables.
        console: What its processes printed.
        notes: What the page leaves out of it.
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
    """All that a page shows.

    Args:
        directory: Where the runs lie.
        made: When it was made (ISO 8601).
        version: Of dist_wandb.
        runs: The runs, grouped, in natural order.
        unreadable: Why files could not be read.
    """

    directory: str
    made: str
    version: str
    runs: list[Run]
    unreadable: list[str]


def shortened(value: float, digits: int = _DIGITS) -> float:
    """A number in so many significant digits; an integer in full."""
    if isinstance(value, int) or not math.isfinite(value):
        return value
    if value.is_integer() and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}")
