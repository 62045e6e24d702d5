"""Read runs from their ``.wandb`` files, record by record, one file after the other, with statistics of their metrics.

The values of a file's metrics are in memory while it is read, 12 bytes each; then only their statistics.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from dist_wandb.errors import ReadError, in_words
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.records import NUMBERS, UNUSED, Record, read_records, whole
from dist_wandb.wandb_files.sidecar import Sidecar, read_sidecar
from dist_wandb.wandb_files.small_files import Directory

MOST_METRICS = 20_000  # of a file; later ones are dropped
RUN_RECORD_LOST = "its run record is lost"  # first words of the problem of a file without one
MOST_VALUES = 50_000_000  # of a file's metrics, that are read at once
TREND_LENGTH = 256  # largest number of points
State = Literal["finished", "failed", "unfinished"]
T = TypeVar("T")

_NAMES_OF_RANKS = ("/argmax_rank", "/straggler_rank")  # ends of the names of metrics whose values are ranks
_BETWEEN_CHECKS = 4096  # rows
_LONGEST_NAME = 1000  # characters of a metric's name
_LARGEST_CONFIG = 4 * 2**20  # characters
_MOST_COUNTED = 4096  # ranks


@dataclass(frozen=True)
class MetricHistory:
    """Statistics of one metric over a run, in the order of logging.

    Args:
        count: Number of rows with the metric.
        not_finite: Number of NaN and infinite values.
        last: The last value.
        smallest: The smallest value except NaN; NaN if there is none.
        largest: The largest value except NaN; NaN if there is none.
        trend: The means of the finite values in at most `TREND_LENGTH` equal stretches of the history, oldest first;
            NaN for a stretch without any.
        counts: Each value and its number of occurrences, the most frequent first; only for metrics whose values are
            ranks.
    """

    count: int
    not_finite: int
    last: float
    smallest: float
    largest: float
    trend: tuple[float, ...] = field(repr=False)
    counts: tuple[tuple[float, int], ...] = field(default=(), repr=False)


class MetricColumns(dict[str, tuple["array[int]", "array[float]"]]):
    """The numbers of rows and the values of metrics that match one of `patterns`; those of other names are dropped."""

    def __init__(self, patterns: Iterable[str] = ("*",)) -> None:
        super().__init__()
        self.has_more: bool = False
        self.also: set[str] = set()  # names that are kept as well, such as W&B's own
        self.wants: Callable[[str], object] = re.compile("|".join(map(translate, patterns)) or "(?!)").match

    def __missing__(self, name: str) -> tuple[array[int], array[float]]:
        is_long, column = len(name) > _LONGEST_NAME, (array("I"), array("d"))
        if name in self.also or (name[:1] != "_" and (is_long or self.wants(name))):
            if not is_long and len(self) < MOST_METRICS:
                self[name] = column
            else:
                self.has_more = True
        return column


_OF_RUN = {"name": "display_name", "project": "project", "group": "run_group", "job_type": "job_type"}
_OF_RUN |= {"entity": "entity", "started": "start_time"}  # by attribute of `StoredRun`: the field of a run's record


@dataclass(eq=False)
class StoredRun:
    """The contents of one ``.wandb`` file: a run, or the part of one writer of a shared run.

    It is filled by the file's records (`read`, or `add` for each of them), and complete after `end`.
    """

    path: Path
    directory: Directory  # the directory in which the file was found; everything of the run is read there
    run_id: str = ""
    name: str | None = None  # display name; `None` if W&B chooses it at the upload
    project: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)  # the last one
    started: str | None = None  # in W&B's format (ISO 8601, UTC); `None` if it is lost
    exit_code: int | None = None  # 0 for success; `None` if the file records no end
    rows: int = 0
    metrics: dict[str, MetricHistory] = field(default_factory=dict)  # numeric ones, in natural order, without W&B's own
    sidecar: Sidecar | None = None  # dist_wandb's record in the same directory; `None` for an ordinary run
    problems: tuple[str, ...] = ()  # unreadable parts, each as a sentence fragment
    # whether metrics were dropped: beyond `MOST_METRICS`, or with names over 1000 characters
    has_more_metrics: bool = False
    entity: str | None = None  # owner of the run, if the user named one
    step_axis: str | None = None  # name of the x axis that is defined for all metrics; `None` if no axis is defined
    branches: bool = False  # whether it begins by rewinding or forking a run
    # the values of its metrics, while it is read
    columns: MetricColumns = field(default_factory=MetricColumns, repr=False)
    record: dict[str, Any] = field(default_factory=dict, repr=False)  # the last one of the run itself
    _size: int = 0  # of the config, in characters
    _left_out: int = 0  # number of values that are too large for it
    _skipped: list[str] = field(default_factory=list)  # damaged parts

    @property
    def state(self) -> State:
        """`"finished"` (exit code 0), `"failed"`, or `"unfinished"`: still running, or killed before its end."""
        if self.exit_code is None:
            return "unfinished"
        return "finished" if self.exit_code == 0 else "failed"

    @property
    def shared_as(self) -> Sidecar | None:
        """Label and role of the file's writer in a shared run; `None` in a plain one."""
        return self.sidecar if self.sidecar is not None and self.sidecar.shared else None

    @property
    def job(self) -> tuple[str, ...] | None:
        """What all runs of a job with a run for each rank have in common, its base id last; `None` for another run."""
        sidecar = self.sidecar
        if sidecar is None or sidecar.run_mode != "new" or sidecar.world_size == 1:
            return None
        return "job", self.project or "", self.group or sidecar.group or "", sidecar.base_id or ""

    def read(self, skipped: Collection[str] = UNUSED) -> None:
        for record in read_records(self.path, self._skipped, skipped=skipped, within=self.directory):
            self.add(record)

    def add(self, record: Record) -> None:
        kind, contents = record
        if kind == "history":
            columns, (numbers, media) = self.columns, numbers_and_media(contents)
            self.add_media(media)
            for name, number in numbers.items():
                rows, values = columns[name]
                rows.append(self.rows)
                values.append(number)
            self.rows += 1
            if not self.rows % _BETWEEN_CHECKS and sum(len(rows) for rows, _ in columns.values()) > MOST_VALUES:
                raise ReadError(f"Its metrics have more than {MOST_VALUES} values. Request fewer names.")
        elif kind == "run":  # repeated when name, tags or notes change: the last record holds
            self.record = contents
            vars(self).update({name: contents.get(field) for name, field in _OF_RUN.items()})
            self.run_id, self.tags = contents.get("run_id") or "", tuple(contents.get("tags", ()))
            self.branches |= bool(contents.get("branch_point"))
            self._configure(contents.get("config", {}))
        elif kind == "config":
            self._configure(contents)
        elif kind == "exit":
            self.exit_code = contents.get("exit_code", 0)
        elif kind == "metric" and contents.get("glob_name") == "*":
            self.step_axis = contents.get("step_metric")

    def add_media(self, media: Mapping[str, dict[str, Any]]) -> None:
        """Take the media of the row number `rows`, of which nothing is kept here."""

    def _configure(self, contents: Mapping[str, Any]) -> None:
        for name, value in contents.get("update", {}).items():
            replaced = len(name) + len(repr(self.config[name])) if name in self.config else 0
            total = self._size - replaced + len(name) + len(repr(value))
            if name != "_wandb" and total <= _LARGEST_CONFIG:
                self.config[name], self._size = value, total
            else:
                self._left_out += name != "_wandb"

    def end(self) -> None:
        """Take what follows from the records so far. Of a file that is followed, more of them come."""
        found = [*self._skipped]
        if self._left_out:
            found.append(f"{self._left_out} values of its config are left out because it is too large")
        if not self.record and not self.rows:
            size = self.path.stat().st_size if self.path.exists() else 0
            if found:
                raise ReadError(f"{self.path}: its {size} bytes contain no readable data of a run: {'; '.join(found)}")
            reason = f"does not contain a run yet ({size} bytes)" if size else "is empty"
            raise ReadError(f"{self.path}: {reason}: the run was killed at its start, or has just started")
        if not self.record:
            found.append(f"{RUN_RECORD_LOST}, and with it name, project, group and config")
        try:
            self.sidecar = read_sidecar(self.directory)
        except ReadError as error:
            found.append(str(error))
        self.problems, self.has_more_metrics = tuple(found), self.columns.has_more
        self.run_id = self.run_id or self.path.stem.removeprefix("run-")
        self.metrics = {
            name: history_of(self.columns[name][1], counted=name.endswith(_NAMES_OF_RANKS))
            for name in sorted(self.columns, key=natural_order)
        }


def read_run(
    path: Path,
    directory: Directory,  # of the file, as `find_files` found it
    metrics: Iterable[str] | None = ("*",),  # patterns such as ``val/*``; `None` not to read rows, which is faster
) -> StoredRun:
    # ``run.finish()`` returns before the file is complete: for about a second the state of the run may be
    # `"unfinished"`.
    run = StoredRun(path, directory, columns=MetricColumns(metrics or ()))
    run.read(UNUSED if metrics is not None else UNUSED | {"history"})
    if metrics is None and not run.record:  # its rows may be readable
        return read_run(path, directory)
    run.end()
    run.columns.clear()
    return run


def read_each(
    files: Mapping[Path, Directory], read: Callable[[Path, Directory], T]
) -> tuple[list[T], list[tuple[Path, ReadError]]]:
    """Read files one after the other; return the results in order, and the errors. Any failure affects one file."""
    results: list[T] = []
    errors: list[tuple[Path, ReadError]] = []
    for path, directory in files.items():
        try:
            results.append(read(path, directory))
        except Exception as error:  # noqa: BLE001, PERF203
            errors.append((path, ReadError(in_words(error, path))))
    return results, errors


def largest_step(path: str | os.PathLike[str], name: str) -> int | None:
    """Return the largest value of an x axis that is an exact integer; `None` if no row has one."""
    values = (row.get(name) for row in rows_in(Path(path)))
    # The comparison is false for NaN.
    exact = (int(x) for x in values if isinstance(x, (int, float)) and abs(x) <= LARGEST_EXACT_INTEGER)
    return max(exact, default=None)


def rows_in(path: Path, within: Directory | None = None) -> Iterator[dict[str, Any]]:
    """Iterate over the history rows of a file, with W&B's own keys (``_step``); raise as `read_records` does."""
    return (contents for kind, contents in read_records(path, within=within) if kind == "history")


def numbers_and_media(row: Mapping[str, Any]) -> tuple[Mapping[str, float], dict[str, dict[str, Any]]]:
    """Return the numbers of a row, and its media: ``x._type``, ``x.width`` and so on describe an image ``x``."""
    if NUMBERS.issuperset(map(type, row.values())):
        return row, {}
    numbers = {name: value for name, value in row.items() if type(value) in NUMBERS}
    starts = {name[: -len("_type")] for name, kind in row.items() if name.endswith("._type") and isinstance(kind, str)}
    media: dict[str, dict[str, Any]] = {}
    start = None
    for name in sorted(starts.union(row)) if starts else ():  # names with the same start follow each other
        if start is None or not name.startswith(start):
            start = name if name in starts else None
        if start is not None and name in row:
            media.setdefault(start[:-1], {})[name[len(start) :]] = row[name]
            numbers.pop(name, None)
    return numbers, media


def history_of(values: Sequence[float], *, counted: bool = False) -> MetricHistory:
    """Return the statistics of at least one value, with the number of occurrences of each value if `counted`."""
    finite = list(filter(math.isfinite, values))
    known = finite if len(finite) == len(values) else [value for value in values if not math.isnan(value)]
    counts = Counter(finite).most_common(_MOST_COUNTED) if counted else []
    return MetricHistory(
        count=len(values),
        not_finite=len(values) - len(finite),
        last=whole(values[-1]),
        smallest=whole(min(known, default=math.nan)),
        largest=whole(max(known, default=math.nan)),
        trend=trend_of(values),
        counts=tuple((whole(value), count) for value, count in counts),
    )


def joined(histories: Sequence[MetricHistory]) -> MetricHistory:
    """Join the statistics of consecutive parts of a metric; each has a share of the trend by its number of values."""
    if len(histories) == 1:
        return histories[0]
    values = sum(part.count for part in histories)
    trend: list[float] = []
    for part in histories:
        trend += trend_of(part.trend, max(1, round(TREND_LENGTH * part.count / values)))
    counts: Counter[float] = Counter()
    for part in histories:
        counts.update(dict(part.counts))
    known = [part for part in histories if not math.isnan(part.smallest)]
    return MetricHistory(
        count=values,
        not_finite=sum(part.not_finite for part in histories),
        last=histories[-1].last,
        smallest=min((part.smallest for part in known), default=math.nan),
        largest=max((part.largest for part in known), default=math.nan),
        trend=tuple(trend),
        counts=tuple(counts.most_common()),
    )


def trend_of(values: Sequence[float], most: int = TREND_LENGTH) -> tuple[float, ...]:
    """Return the means of at most `most` stretches of about the same length."""
    stretches = min(len(values), most)
    bounds = [index * len(values) // stretches for index in range(stretches + 1)] if stretches else []
    return tuple(mean_of(values[begin:end]) for begin, end in pairwise(bounds))


def mean_of(values: Sequence[float]) -> float:  # of the finite ones
    if len(values) == 1:
        return float(values[0]) if math.isfinite(values[0]) else math.nan
    finite = list(filter(math.isfinite, values))
    total = sum(finite)
    if math.isfinite(total):
        return total / len(finite) if finite else math.nan
    return sum(value / len(finite) for value in finite)  # their sum is too large
