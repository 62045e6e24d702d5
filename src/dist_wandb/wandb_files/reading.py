"""Read runs from their ``.wandb`` files, record by record, one file after the other.

The values of a file's metrics are in memory while it is read, 8 bytes each; then only their statistics.
"""

from __future__ import annotations

import math
import os
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Any, Literal, TypeVar

from dist_wandb.errors import ReadError, in_words
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER
from dist_wandb.wandb_files.finding import natural_order
from dist_wandb.wandb_files.records import UNUSED, inspect, records_of
from dist_wandb.wandb_files.sidecar import Sidecar, read_sidecar
from dist_wandb.wandb_files.small_files import Directory
from dist_wandb.wandb_files.statistics import MetricHistory, history_of

MOST_METRICS = 20_000
"""Largest number of metrics of a file; later ones are dropped."""

RUN_RECORD_LOST = "its run record is lost"
"""First words of the problem that describes a file without a run record."""

MOST_VALUES = 50_000_000
"""Largest number of values that are read of a file's metrics at once."""

State = Literal["finished", "failed", "unfinished"]
T = TypeVar("T")

_NAMES_OF_RANKS = ("/argmax_rank", "/straggler_rank")  # ends of the names of metrics whose values are ranks
_BETWEEN_CHECKS = 4096  # rows
_LONGEST_NAME = 1000  # characters of a metric's name
_LARGEST_CONFIG = 1_000_000  # values, and stretches of 64 characters
_NUMBERS = frozenset({int, float})  # without bool
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for these


@dataclass(frozen=True)
class StoredRun:
    """The contents of one ``.wandb`` file: a run, or the part of one writer of a shared run."""

    path: Path
    run_id: str
    name: str | None  # display name; `None` if W&B chooses it at the upload
    project: str | None
    group: str | None
    job_type: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]  # the last one
    started: str | None  # in W&B's format (ISO 8601, UTC); `None` if it is lost
    exit_code: int | None  # 0 for success; `None` if the file records no end
    rows: int
    metrics: dict[str, MetricHistory]  # numeric metrics by name, in natural order, without W&B's own (``_step``)
    sidecar: Sidecar | None  # dist_wandb's record in the same directory; `None` for an ordinary run
    problems: tuple[str, ...]  # unreadable parts, each as a sentence fragment
    # whether metrics were dropped: beyond `MOST_METRICS`, or with names over 1000 characters
    has_more_metrics: bool = False
    entity: str | None = None  # owner of the run, if the user named one
    step_axis: str | None = None  # name of the x axis that is defined for all metrics; `None` if no axis is defined
    directory: Directory | None = None  # the directory in which the file was found; everything of the run is read there
    branches: bool = False  # whether it begins by rewinding or forking a run

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

    @property
    def label(self) -> str | None:
        """The writer's name within a shared run; `None` in an ordinary run."""
        return self.sidecar.label if self.sidecar else None


def read_run(
    path: str | os.PathLike[str],
    *,
    metrics: Iterable[str] | None = ("*",),  # patterns such as ``val/*``; `None` not to read rows, which is faster
    directory: Directory | None = None,  # as `find_files` found it; `None` for the one that is there now
) -> StoredRun:
    """Read one ``.wandb`` file, and dist_wandb's sidecar in the same directory. Damaged parts are skipped.

    ``run.finish()`` returns before the file is complete: for about a second the state of the run may be `"unfinished"`.
    Raises `ReadError` if it contains no readable data of a run.
    """
    path = Path(path)
    contents = Contents(metrics or ())
    try:
        directory = directory or Directory.at(path.parent)
    except OSError as error:
        raise ReadError(f"{path}: its directory cannot be opened: {error.strerror or error}.") from None
    skipped = UNUSED if metrics is not None else UNUSED | {"history"}
    problems = inspect(path, contents.add, skipped=skipped, within=directory)
    if metrics is None and not contents.run:  # its rows may be readable
        return read_run(path, directory=directory)
    if contents.run or contents.rows:
        return contents.as_run(path, problems, directory)
    size = path.stat().st_size
    if lost := [*problems, *contents.problems]:
        raise ReadError(f"{path}: its {size} bytes contain no readable data of a run: {'; '.join(lost)}")
    reason = f"does not contain a run yet ({size} bytes)" if size else "is empty"
    raise ReadError(f"{path}: {reason}: the run was killed at its start, or has just started")


def read_runs(
    paths: Iterable[Path] | Mapping[Path, Directory], *, metrics: Iterable[str] | None = ("*",)
) -> tuple[list[StoredRun], dict[Path, ReadError]]:
    """Read several files as `read_run` does; return runs in order, and the errors of the others."""
    patterns = None if metrics is None else tuple(metrics)
    known = paths if isinstance(paths, Mapping) else {}
    return read_each(paths, lambda path: read_run(path, metrics=patterns, directory=known.get(path)))


def read_each(paths: Iterable[Path], read: Callable[[Path], T]) -> tuple[list[T], dict[Path, ReadError]]:
    """Read files one after the other; return the results in order, and the errors. Any failure affects one file."""
    results: list[T] = []
    errors: dict[Path, ReadError] = {}
    for path in paths:
        try:
            results.append(read(path))
        except ReadError as error:  # noqa: PERF203
            errors[path] = error
        except Exception as error:  # noqa: BLE001
            errors[path] = ReadError(in_words(error, path))
    return results, errors


def read_history(path: str | os.PathLike[str], *, last: int | None = None) -> list[dict[str, Any]]:
    """Read the `last` history rows of a file (`None`: all), in the order of writing. Raises as `records_of` does.

    Keys of nested dictionaries are joined by dots (``val.loss``); W&B's own keys (``_step``, ``_runtime``,
    ``_timestamp``) are included. NaN and infinities are floats; W&B's file does not distinguish them from the strings
    ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.
    """
    rows = deque(rows_in(Path(path)), maxlen=last)
    return [{name: with_floats(value) for name, value in row.items()} for row in rows]


def largest_step(path: str | os.PathLike[str], name: str) -> int | None:
    """Return the largest value of an x axis that is an exact integer; `None` if no row has one."""
    values = (with_floats(row.get(name)) for row in rows_in(Path(path)))
    # The comparison is false for NaN.
    exact = (int(x) for x in values if isinstance(x, (int, float)) and abs(x) <= LARGEST_EXACT_INTEGER)
    return max(exact, default=None)


def rows_in(path: Path, within: Directory | None = None) -> Iterator[dict[str, Any]]:
    """Yield the history rows of a file as they are stored; raise as `records_of` does."""
    for record in records_of(path, [], within=within):
        if record is not None and record["type"] == "history":
            yield record["history"]["item"]


class BoundedConfig:
    """A config of bounded size. Values that exceed it are counted and dropped."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.left_out: int = 0
        self._sizes: dict[str, int] = {}
        self._size = 0

    def update(self, update: Mapping[str, Any]) -> None:
        """Set values, as `dict.update` does."""
        for name, value in update.items():
            size = _size_of(value) + _size_of(name)
            total = self._size - self._sizes.get(name, 0) + size
            if total > _LARGEST_CONFIG:
                self.left_out += 1
                continue
            self.values[name] = value
            self._sizes[name], self._size = size, total


class Contents:
    """Collects the contents of one file's records."""

    def __init__(self, metrics: Iterable[str] = ("*",)) -> None:
        self.run: dict[str, Any] = {}
        self.config: BoundedConfig = BoundedConfig()
        self.exit_code: int | None = None
        self.step_axis: str | None = None
        self.rows: int = 0
        self.metrics: dict[str, array[float]] = {}
        self.has_more_metrics: bool = False
        self.branches: bool = False
        self._is_wanted = re.compile("|".join(map(translate, metrics)) or "(?!)").match

    @property
    def problems(self) -> list[str]:
        """The dropped contents, as sentence fragments."""
        left_out = self.config.left_out
        return [f"{left_out} values of its config are left out because it is too large"] if left_out else []

    def add(self, record: dict[str, Any]) -> None:
        """Add a record, unless its kind is not needed."""
        kind = record["type"]
        if kind == "history":
            self._add_row(record["history"]["item"])
        elif kind == "run":  # repeated when name, tags or notes change: the last record holds
            self.run = record["run"]
            self.branches |= bool(self.run.get("branch_point"))
            self.config.update(self.run.get("config", {}).get("update", {}))
        elif kind == "config":
            self.config.update(record["config"].get("update", {}))
        elif kind == "exit":
            self.exit_code = record["exit"].get("exit_code", 0)
        elif kind == "metric" and record["metric"].get("glob_name") == "*":
            self.step_axis = record["metric"].get("step_metric")

    def as_run(self, path: Path, problems: Iterable[str], directory: Directory | None = None) -> StoredRun:
        """Return the run that the records describe, with the sidecar in the file's directory, and all problems."""
        run, found = self.run, [*problems, *self.problems]
        if not run:
            found.append(f"{RUN_RECORD_LOST}, and with it name, project, group and config")
        try:
            sidecar = read_sidecar(path.parent, directory)
        except ReadError as error:
            sidecar = None
            found.append(str(error))
        return StoredRun(
            path=path,
            directory=directory,
            run_id=run.get("run_id") or path.stem.removeprefix("run-"),
            name=run.get("display_name"),
            project=run.get("project"),
            group=run.get("run_group"),
            job_type=run.get("job_type"),
            tags=tuple(run.get("tags", ())),
            config={name: value for name, value in self.config.values.items() if name != "_wandb"},
            started=run.get("start_time"),
            exit_code=self.exit_code,
            rows=self.rows,
            metrics={
                name: history_of(self.metrics[name], counted=name.endswith(_NAMES_OF_RANKS))
                for name in sorted(self.metrics, key=natural_order)
            },
            sidecar=sidecar,
            problems=tuple(found),
            has_more_metrics=self.has_more_metrics,
            entity=run.get("entity"),
            step_axis=self.step_axis,
            branches=self.branches,
        )

    def _add_row(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        is_plain = _NUMBERS.issuperset(map(type, row.values()))
        media = () if is_plain else _of_media(row)
        for name, value in row.items():
            number = value if type(value) is float else with_floats(value)
            if name[:1] == "_" or not (is_plain or (type(number) in _NUMBERS and name not in media)):
                continue
            column = self.metrics.get(name)
            if column is None:
                is_long = len(name) > _LONGEST_NAME
                if not is_long and not self._is_wanted(name):
                    continue
                if is_long or len(self.metrics) == MOST_METRICS:
                    self.has_more_metrics = True
                    continue
                column = self.metrics[name] = array("d")
            column.append(number)
        if not self.rows % _BETWEEN_CHECKS and sum(map(len, self.metrics.values())) > MOST_VALUES:
            raise ReadError(f"Its metrics have more than {MOST_VALUES} values. Request fewer names.")


def _of_media(row: Mapping[str, Any]) -> set[str]:
    """Return the names of the parts of media: ``x._type``, ``x.width`` and so on for an image ``x``."""
    media = {
        name.removesuffix("_type") for name, kind in row.items() if name.endswith("._type") and isinstance(kind, str)
    }
    found: set[str] = set()
    if media:
        under = None  # sorted, so that names with a common prefix follow each other
        for name in sorted(media.union(row)):
            if under is not None and name.startswith(under):
                found.add(name)
            elif name in media:
                under = name
                found.add(name)
    return found


def _size_of(value: Any) -> int:
    """Return the approximate size of a JSON value: the number of values and of stretches of 64 characters."""
    size, pending = 0, [value]
    while pending:
        item = pending.pop()
        size += 1 + (len(item) // 64 if isinstance(item, str) else 0)
        if isinstance(item, dict):
            pending.extend(item)
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
    return size


def with_floats(value: Any) -> Any:
    """Convert W&B's strings for NaN and infinity, and integers beyond any float, to floats; keep other values."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value
