"""What lies on disk after offline runs: find the run files below a directory and read them back.

W&B ships no Python reader for its ``.wandb`` files, so they are read through ``wandb leet inspect --json``, one record
at a time: of a history of any length only running statistics and a bounded trend of each metric are kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import re
import reprlib
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dist_wandb.errors import ReadError, UnsupportedVersionError, in_words
from dist_wandb.settings.plan import RANK_SCOPES, RUN_MODES
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER
from dist_wandb.wandb_files.bounded_reader import Limits, lines_of
from dist_wandb.wandb_files.environment import reader_environment
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME
from dist_wandb.wandb_files.small_files import is_deeper, open_ordinary, parse_json, private_directory, read_small

SIDECAR_FORMAT = 1
"""The only sidecar format this version knows."""

TREND_LENGTH = 256
"""Largest number of points kept of a metric's history."""

MOST_METRICS = 20_000
"""Largest number of metrics kept of a file; the first that come are."""

RUN_RECORD_LOST = "its run record is lost"
"""How a problem of a file begins of which nothing tells which run it is."""

State = Literal["finished", "failed", "unfinished"]

_READER_SINCE = "0.31"  # `wandb leet inspect` is older, its --json is not
_RUN_FILE = re.compile(r"run-.+\.wandb")
_PARALLEL_READERS = 4  # each is a process of its own, of about half a second
_COMPLAINTS = 1024 * 1024  # bytes of what the reader says of damage that are looked at
_MOST_PROBLEMS, _LONGEST_PROBLEM = 20, 1000  # that are told of one file; characters of each
_LARGE_LINE = 256 * 1024
_MOST_ENTRIES, _DEEPEST = 10_000_000, 64  # of a search for runs
_NATURAL = 512  # characters whose numbers count as numbers
_LONGEST_NAME = 1000  # characters of a metric's name
_LARGEST_CONFIG = 1_000_000  # values, and stretches of 64 characters
_log = logging.getLogger("dist_wandb")
_one_large_line = threading.Lock()
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}  # JSON has no numbers for these
# Most of a file is these records, which nothing here needs: they are told by the head of the line, without parsing it.
_UNUSED_RECORD = re.compile(rb'\{"num":\d+,"type":"(?:summary|stats|output|output_raw|telemetry)"')


@dataclass(frozen=True)
class Sidecar:
    """What dist_wandb recorded beside an offline run, because W&B's own file does not hold it.

    Args:
        run_id: Id of the run; `None` where W&B made it.
        base_id: The id that all run ids of the job are made from; `None` where W&B made the run's id.
        run_mode: `"auto"`, `"shared"` or `"new"`.
        rank_scope: `"global"` or `"worker"`.
        shared: Whether several ranks wrote into the run, each into a file of its own.
        label: The writer's name within a shared run.
        primary: Whether the writer wrote the plain names of its run.
        update_finish_state: Whether the writer's exit code is the run's.
        group: Group of the run.
        global_rank: The writer's index among all ranks.
        local_rank: The writer's index on its node, if it was known.
        node_rank: Index of the writer's node, if it was known.
        world_size: Number of ranks of the job.
        num_nodes: Number of nodes of the job, if it was known.
    """

    run_id: str | None
    base_id: str | None
    run_mode: str
    rank_scope: str
    shared: bool
    label: str | None
    primary: bool
    update_finish_state: bool
    group: str | None
    global_rank: int
    local_rank: int | None
    node_rank: int | None
    world_size: int
    num_nodes: int | None


@dataclass(frozen=True)
class MetricHistory:
    """The values of one metric over a run, in the order in which they were logged.

    Args:
        count: Number of rows that carry the metric.
        not_finite: How many of them are NaN or infinite.
        last: The value logged last.
        smallest: The smallest value, NaN left aside; NaN if there is no other.
        largest: The largest value, NaN left aside; NaN if there is no other.
        trend: The mean of each of at most `TREND_LENGTH` equal stretches of the history, oldest first. Values that are
            not finite are left aside; a stretch without any other is NaN.
    """

    count: int
    not_finite: int
    last: float
    smallest: float
    largest: float
    trend: tuple[float, ...]


@dataclass(frozen=True)
class StoredRun:
    """One ``.wandb`` file: a run, or what one writer of a shared run wrote.

    Args:
        path: The ``.wandb`` file.
        run_id: Id of the run.
        name: Display name; `None` where W&B is to choose it at the upload.
        project: Project of the run.
        group: Group of the run.
        job_type: Job type of the run.
        tags: Tags of the run.
        config: The run's configuration at its end.
        started: When the run was opened, as W&B wrote it (ISO 8601, UTC); `None` where that is lost.
        exit_code: Exit code of the run, 0 for success; `None` where the file records no end.
        rows: Number of history rows.
        metrics: The numeric metrics by name, in natural order; names with a leading underscore are W&B's own.
        sidecar: What dist_wandb recorded beside the file; `None` for an ordinary run.
        problems: What could not be read, each as a sentence fragment; empty for a sound file.
        has_more_metrics: Whether there are metrics that are not kept: beyond `MOST_METRICS`, or with a name of more
            than 1000 characters.
        entity: Who is to own the run, where that was said when it was written.
    """

    path: Path
    run_id: str
    name: str | None
    project: str | None
    group: str | None
    job_type: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]
    started: str | None
    exit_code: int | None
    rows: int
    metrics: dict[str, MetricHistory]
    sidecar: Sidecar | None
    problems: tuple[str, ...]
    has_more_metrics: bool = False
    entity: str | None = None

    @property
    def state(self) -> State:
        """`"finished"` (exit code 0), `"failed"`, or `"unfinished"`: still running, or killed before its end."""
        if self.exit_code is None:
            return "unfinished"
        return "finished" if self.exit_code == 0 else "failed"

    @property
    def label(self) -> str | None:
        """The writer's name within a shared run; `None` in an ordinary run."""
        return self.sidecar.label if self.sidecar else None


def find_runs(directory: str | os.PathLike[str], *, report: Callable[[ReadError], None] | None = None) -> list[Path]:
    """Find the files of W&B runs below a directory.

    Args:
        directory: Where to look: any directory, a run's own directory, or a single ``.wandb`` file. Symbolic links
            below it (W&B's ``latest-run``) are not followed.
        report: Called for each directory below it in which nobody has looked: it cannot be read, or lies more than 64
            levels below, or below more than ten million other entries. Logged as warnings if `None`.

    Returns:
        The ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their paths
        (``rank-2`` before ``rank-10``). What has such a name and is no file is among them: it cannot be read.

    Raises:
        ReadError: `directory` does not exist, cannot be entered, or is some other file.
    """
    top = Path(directory)
    if top.suffix == ".wandb" and top.is_file():
        return [top.resolve() if top.is_symlink() else top]  # whoever names a link means the file
    try:
        os.listdir(top)  # noqa: PTH208  # the search passes over such errors
    except OSError as error:
        raise ReadError(
            f"Cannot look for runs in {str(top)!r}: {error.strerror}. Give an existing directory."
        ) from None
    found = filter(is_in_run_directory, _run_files_below(top, report or _warn))
    return sorted(found, key=lambda path: natural_order(str(path)))


def _run_files_below(top: Path, report: Callable[[ReadError], None]) -> Iterator[Path]:
    """What has the name of a run's file, at any depth."""
    folders = deque([(top, 0)])
    left = _MOST_ENTRIES
    while folders:
        folder, depth = folders.popleft()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0:
                        report(
                            ReadError(f"{top}: only {_MOST_ENTRIES} entries are looked at. Give a narrower directory.")
                        )
                        return
                    if _RUN_FILE.fullmatch(entry.name):
                        yield folder / entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        continue
                    if depth < _DEEPEST:
                        folders.append((folder / entry.name, depth + 1))
                    else:
                        report(ReadError(f"{folder / entry.name}: lies more than {_DEEPEST} levels below {top}."))
        except OSError as error:
            report(ReadError(f"{folder}: cannot be looked through: {error.strerror or error}."))


def _warn(error: ReadError) -> None:
    _log.warning("dist_wandb: %s", error)


def natural_order(text: str) -> list[str]:
    """A sort key that puts ``rank-2`` before ``rank-10``."""
    start, rest = text[:_NATURAL], text[_NATURAL:]  # a list of all parts is 50 times as large as the text
    return [*(part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", start)), rest]


def read_run(path: str | os.PathLike[str], *, metrics: Iterable[str] = ("*",)) -> StoredRun:
    """Read one ``.wandb`` file, and dist_wandb's sidecar beside it.

    ``run.finish()`` returns before the file is whole: for about a second the run may read as `"unfinished"`.

    Args:
        path: A ``.wandb`` file, as `find_runs` gives it.
        metrics: Patterns such as ``val/*``; metrics whose names match none of them are left out.

    Returns:
        What the file holds. Parts of it that are damaged are skipped and named in `StoredRun.problems`.

    Raises:
        ReadError: Nothing of a run can be read from the file.
        UnsupportedVersionError: The installed wandb cannot read ``.wandb`` files for others.
    """
    return _read_run(Path(path), tuple(metrics), threading.Event())


def _read_run(path: Path, metrics: tuple[str, ...], stopped: threading.Event) -> StoredRun:
    contents = _Contents(metrics)
    problems = _inspect(path, contents.take, stopped) + contents.problems
    if not contents.run and not contents.rows:
        raise ReadError(_nothing_in(path, problems))
    if not contents.run:
        problems.append(f"{RUN_RECORD_LOST}, and with it name, project, group and config")
    try:
        sidecar = read_sidecar(path.parent)
    except ReadError as error:
        sidecar = None
        problems.append(str(error))
    return contents.as_run(path, sidecar, problems)


def read_runs(
    paths: Iterable[Path], *, metrics: Iterable[str] = ("*",)
) -> tuple[list[StoredRun], dict[Path, ReadError]]:
    """Read several ``.wandb`` files, a few at a time.

    Args:
        paths: The files, as `find_runs` gives them.
        metrics: As for `read_run`.

    Returns:
        The runs that could be read, in the order of `paths`, and for each other file the reason.

    Raises:
        UnsupportedVersionError: The installed wandb cannot read ``.wandb`` files for others.
    """
    paths = list(paths)
    stopped = threading.Event()
    read = partial(_run_or_error, metrics=tuple(metrics), stopped=stopped)
    with ThreadPoolExecutor(_PARALLEL_READERS) as readers:
        try:
            outcomes = list(readers.map(read, paths))
        except BaseException:  # an interrupt, say: the readers are not waited for
            stopped.set()
            raise
    runs = [outcome for outcome in outcomes if isinstance(outcome, StoredRun)]
    errors = {path: outcome for path, outcome in zip(paths, outcomes, strict=True) if isinstance(outcome, ReadError)}
    return runs, errors


def read_history(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read all history rows of one ``.wandb`` file; the whole history is held in memory.

    Args:
        path: A ``.wandb`` file, as `find_runs` gives it.

    Returns:
        One dictionary per row, in the order written. Keys of nested dictionaries are joined by dots (``val.loss``), and
        W&B's own (``_step``, ``_runtime``, ``_timestamp``) are among them. NaN and infinities are floats; W&B's file
        does not tell them from the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``.

    Raises:
        ReadError: The file cannot be read at all. Damaged parts are skipped; `read_run` names them.
        UnsupportedVersionError: The installed wandb cannot read ``.wandb`` files for others.
    """
    rows: list[dict[str, Any]] = []
    _read_rows(Path(path), rows.append)
    return rows


def last_rows(path: str | os.PathLike[str], count: int) -> list[dict[str, Any]]:
    """As `read_history`, but only the last `count` rows are held in memory and returned."""
    rows: deque[dict[str, Any]] = deque(maxlen=count)
    _read_rows(Path(path), rows.append)
    return list(rows)


def largest_step(path: str | os.PathLike[str], name: str) -> int | None:
    """The largest value that an x axis has in any row of a file; rows are looked at one by one, not kept.

    Args:
        path: A ``.wandb`` file.
        name: The name of the x axis.

    Returns:
        The value; `None` where no row has one. What floats cannot tell from the next whole number is none.

    Raises:
        ReadError: As of `read_history`.
        UnsupportedVersionError: As of `read_history`.
    """
    largest: int | None = None

    def take(row: dict[str, Any]) -> None:
        nonlocal largest
        value = row.get(name)
        if isinstance(value, (int, float)) and abs(value) <= LARGEST_EXACT_INTEGER:  # false of NaN, too
            largest = int(value) if largest is None else max(largest, int(value))

    _read_rows(Path(path), take)
    return largest


def _read_rows(path: Path, take_row: Callable[[dict[str, Any]], None]) -> None:
    def take(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            take_row({name: _with_floats(value) for name, value in _object(record["history"], "item").items()})

    _inspect(path, take)


def read_sidecar(run_directory: str | os.PathLike[str]) -> Sidecar | None:
    """Read what dist_wandb recorded in a run's directory.

    Args:
        run_directory: The directory that holds the ``.wandb`` file.

    Returns:
        The record, or `None` where dist_wandb left none: an ordinary run.

    Raises:
        ReadError: There is a record, but it is not what dist_wandb writes.
    """
    path = Path(run_directory) / SIDECAR_NAME
    try:
        return _sidecar(parse_json(read_small(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ReadError(
            f"{path}: not what dist_wandb writes ({error}), so label and primary of this writer are not known. "
            "Restore the file, or remove it to treat this as an ordinary run."
        ) from None


def _sidecar(record: Any) -> Sidecar:
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004  # a value of the file, as all that is wrong with it
    if record.get("format") != SIDECAR_FORMAT:
        raise ValueError(f"format {reprlib.repr(record.get('format'))}, while this version reads {SIDECAR_FORMAT}")
    sidecar = Sidecar(**{field.name: _sidecar_value(record, field.name, str(field.type)) for field in fields(Sidecar)})
    if sidecar.global_rank >= sidecar.world_size:
        raise ValueError(f"rank {sidecar.global_rank} of {sidecar.world_size}")
    return sidecar


_LARGEST_WORLD = 1_000_000
_LONGEST_TEXT = 1000  # characters
_PRINTABLE = frozenset({"label", "run_id", "base_id"})
_KNOWN: dict[str, tuple[str, ...]] = {"run_mode": RUN_MODES, "rank_scope": RANK_SCOPES}
_SIDECAR_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
}


def _sidecar_value(record: Mapping[str, Any], name: str, annotation: str) -> Any:
    if name not in record:
        raise ValueError(f"{name!r} is missing")
    value = record[name]
    if type(value) not in _SIDECAR_TYPES[annotation]:
        raise ValueError(f"{name}={reprlib.repr(value)}, which is no {annotation.replace('|', 'or')}")
    if type(value) is int and not 0 <= value <= _LARGEST_WORLD:
        raise ValueError(f"{name}={reprlib.repr(value)}, which is not within 0 and {_LARGEST_WORLD}")
    if type(value) is str and (
        len(value) > _LONGEST_TEXT or "\0" in value or (name in _PRINTABLE and not value.isprintable())
    ):
        raise ValueError(f"{name}={reprlib.repr(value)}, as dist_wandb writes none")
    if name in _KNOWN and value not in _KNOWN[name]:
        raise ValueError(f"{name}={reprlib.repr(value)}, which is none of {', '.join(_KNOWN[name])}")
    return value


def is_in_run_directory(path: Path) -> bool:
    """Whether a file lies in a directory that is named as W&B names those of runs."""
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved: it may have been given as "."


def _run_or_error(path: Path, *, metrics: tuple[str, ...], stopped: threading.Event) -> StoredRun | ReadError:
    try:
        return _read_run(path, metrics, stopped)
    except UnsupportedVersionError:  # concerns all of them
        raise
    except ReadError as error:
        return error
    except Exception as error:  # noqa: BLE001  # whatever the file has brought about: it concerns this file alone
        return ReadError(in_words(error, path))


class _Contents:
    """What the records of one file add up to. Whatever JSON they are, it is taken, refused or passed over."""

    def __init__(self, metrics: Iterable[str] = ("*",)) -> None:
        self.run: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.rows = 0
        self.metrics: dict[str, _Metric] = {}
        self.has_more_metrics = False
        self._is_wanted = re.compile("|".join(map(translate, metrics))).match
        self._config_sizes: dict[str, int] = {}
        self._config_size = 0
        self._left_out = 0

    @property
    def problems(self) -> list[str]:
        """What is not kept, as sentence fragments."""
        return [f"{self._left_out} values of its config are left out, as it is too large"] if self._left_out else []

    def take(self, record: dict[str, Any]) -> None:
        """Add one record; kinds that tell nothing of interest are passed over."""
        kind = record["type"]
        if kind == "history":
            self._take_row(_object(record["history"], "item"))
        elif kind == "run":  # written again whenever name, tags or notes change: the last one holds
            self.run = record["run"]
            self._take_config(_object(_object(self.run, "config"), "update"))
        elif kind == "config":
            self._take_config(_object(record["config"], "update"))
        elif kind == "exit":
            self.exit_code = _exit_code(record["exit"])

    def as_run(self, path: Path, sidecar: Sidecar | None, problems: list[str]) -> StoredRun:
        return StoredRun(
            path=path,
            run_id=_text(self.run, "run_id") or path.stem.removeprefix("run-"),
            name=_text(self.run, "display_name"),
            project=_text(self.run, "project"),
            group=_text(self.run, "run_group"),
            job_type=_text(self.run, "job_type"),
            tags=_texts(self.run, "tags"),
            config={name: value for name, value in self.config.items() if name != "_wandb"},
            started=_text(self.run, "start_time"),
            exit_code=self.exit_code,
            rows=self.rows,
            metrics={name: self.metrics[name].summed_up() for name in sorted(self.metrics, key=natural_order)},
            sidecar=sidecar,
            problems=tuple(problems),
            has_more_metrics=self.has_more_metrics,
            entity=self.run.get("entity"),
        )

    def _take_config(self, update: Mapping[str, Any]) -> None:
        for name, value in update.items():
            size = _size(value) + _size(name)
            total = self._config_size - self._config_sizes.get(name, 0) + size
            if total > _LARGEST_CONFIG:
                self._left_out += 1
                continue
            self.config[name] = value
            self._config_sizes[name], self._config_size = size, total

    def _take_row(self, row: Mapping[str, Any]) -> None:
        self.rows += 1
        media = _of_media(row)
        for name, value in row.items():
            number = _with_floats(value)
            if isinstance(number, bool) or not isinstance(number, int | float) or name in media or name[:1] == "_":
                continue
            metric = self.metrics.get(name)
            if metric is None:
                metric = self._new_metric(name)
            if metric is not None:
                metric.take(number)

    def _new_metric(self, name: str) -> _Metric | None:
        if len(name) > _LONGEST_NAME or len(self.metrics) == MOST_METRICS:
            self.has_more_metrics |= len(name) > _LONGEST_NAME or self._is_wanted(name) is not None
            return None
        if not self._is_wanted(name):
            return None
        self.metrics[name] = metric = _Metric()
        return metric


def _of_media(row: Mapping[str, Any]) -> set[str]:
    """Names of what belongs to images and the like: what is said of ``x`` in ``x._type``, ``x.width`` and so on."""
    media = {
        name.removesuffix("_type") for name, kind in row.items() if name.endswith("._type") and isinstance(kind, str)
    }
    found: set[str] = set()
    if media:
        under = None  # in this order what begins with a text stands right behind it
        for name in sorted(media.union(row)):
            if under is not None and name.startswith(under):
                found.add(name)
            elif name in media:
                under = name
                found.add(name)
    return found


def _object(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _text(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    return value if isinstance(value, str) else None


def _texts(record: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = record.get(name)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def _exit_code(record: Mapping[str, Any]) -> int:
    value = record.get("exit_code", 0)
    return value if type(value) is int else 1


def _size(value: Any) -> int:
    """How much a value of JSON takes, about: of values, and of stretches of 64 characters."""
    size, left = 0, [value]
    while left:
        item = left.pop()
        size += 1 + (len(item) // 64 if isinstance(item, str) else 0)
        if isinstance(item, dict):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
    return size


class _Metric:
    """Running statistics of one metric."""

    __slots__ = ("_count", "_largest", "_last", "_not_finite", "_smallest", "_trend")

    def __init__(self) -> None:
        self._count = 0
        self._not_finite = 0
        self._last = math.nan
        self._smallest = math.inf
        self._largest = -math.inf
        self._trend = _Trend()

    def take(self, value: float) -> None:
        self._count += 1
        self._last = value
        self._not_finite += not math.isfinite(value)
        self._trend.take(value)
        if not math.isnan(value):
            self._smallest = min(self._smallest, value)
            self._largest = max(self._largest, value)

    def summed_up(self) -> MetricHistory:
        only_nan = self._smallest > self._largest
        return MetricHistory(
            count=self._count,
            not_finite=self._not_finite,
            last=self._last,
            smallest=math.nan if only_nan else self._smallest,
            largest=math.nan if only_nan else self._largest,
            trend=self._trend.means(),
        )


class _Trend:
    """Means over equal stretches of a series of unknown length, in bounded memory.

    Whenever the room is used up, neighbouring stretches are merged and all further ones are twice as long.
    """

    __slots__ = ("_finite", "_length", "_length_of_last", "_means")

    def __init__(self) -> None:
        self._means = array("d")  # of the finite values of each stretch,
        self._finite = array("q")  # and their number
        self._length = 1  # of every stretch, but for the last, of which there is only this much:
        self._length_of_last = 0

    def take(self, value: float) -> None:
        if not self._means or self._length_of_last == self._length:
            if len(self._means) == TREND_LENGTH:
                self._merge_neighbours()
            self._means.append(math.nan)
            self._finite.append(0)
            self._length_of_last = 0
        self._length_of_last += 1
        if math.isfinite(value):
            self._means[-1], self._finite[-1] = _merged(self._means[-1], self._finite[-1], float(value), 1)

    def means(self) -> tuple[float, ...]:
        return tuple(self._means)

    def _merge_neighbours(self) -> None:
        stretches = list(zip(self._means, self._finite, strict=True))
        pairs = zip(stretches[::2], stretches[1::2], strict=True)
        merged = [_merged(*left, *right) for left, right in pairs]
        self._means = array("d", (mean for mean, _ in merged))
        self._finite = array("q", (finite for _, finite in merged))
        self._length *= 2


def _merged(mean: float, finite: int, other_mean: float, other_finite: int) -> tuple[float, int]:
    """The mean of so many values and of so many others, and their number; NaN for none."""
    if not other_finite:
        return mean, finite
    if not finite:
        return other_mean, other_finite
    share = other_finite / (finite + other_finite)
    return mean * (1 - share) + other_mean * share, finite + other_finite  # a sum of values could overflow


def _with_floats(value: Any) -> Any:
    """A row's value; strings that stand for NaN and infinity, and integers beyond any float, made floats."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def _inspect(path: Path, take: Callable[[dict[str, Any]], None], stopped: threading.Event | None = None) -> list[str]:
    """Hand the records of a file, but for `_UNUSED_RECORD`, to `take`, one after the other.

    Args:
        path: The file.
        take: Called with each record.
        stopped: Set when nobody wants to know any more.

    Returns:
        What the reader complained about: damaged parts that it skipped.

    Raises:
        ReadError: The reader refused the file, did not come to an end, or the file is no file.
        UnsupportedVersionError: There is no such reader in the installed wandb.
    """
    try:
        limits = Limits.for_file(_size_of(path))
        records = _Records(path)
        returncode, said = _records_of(path, records, take, limits, stopped or threading.Event())
    except OSError as error:
        place = "" if error.filename in (None, str(path)) else f" ({error.filename})"  # of temporary files
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}{place}.") from None
    if returncode:
        raise _reader_failed(path, returncode, said)
    complaint = "wandb leet inspect: "  # other lines are warnings of Python's or wandb's about themselves
    found = [line.removeprefix(complaint) for line in said.splitlines() if line.startswith(complaint)]
    more = [f"and {len(found) - _MOST_PROBLEMS} problems more"] if len(found) > _MOST_PROBLEMS else []
    return [*(problem[:_LONGEST_PROBLEM] for problem in found[:_MOST_PROBLEMS]), *more, *records.problems(limits)]


def _size_of(path: Path) -> int:
    """The size of a file that is an ordinary one; what is a pipe or a device is refused, not waited for."""
    try:
        handle = open_ordinary(path)
    except FileNotFoundError:
        raise ReadError(f"{path}: is not a file. Give a .wandb file, as find_runs() finds them.") from None
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def _records_of(
    path: Path,
    records: _Records,
    take: Callable[[dict[str, Any]], None],
    limits: Limits,
    stopped: threading.Event,
) -> tuple[int, str]:
    """Run the reader to its end; its exit code, and what it complained about.

    The file may come from a stranger, and so may all that lies beside it. So nothing is started there, where Python and
    wandb would look for modules and settings, but in an empty directory of this user's alone.
    """
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.absolute())]
    with private_directory() as private, (private / "complaints").open("w+b") as complaints:
        try:
            with lines_of(
                command,
                directory=private,
                environment=reader_environment(private),
                complaints=complaints,
                limits=limits,
                stopped=stopped,
            ) as lines:
                records.take_from(lines, take)
                returncode = lines.wait()
                records.too_long += lines.too_long
        except ReadError as error:
            raise ReadError(in_words(error, path)) from None
        complaints.seek(0)
        return returncode, complaints.read(_COMPLAINTS).decode("utf-8", errors="replace").strip()


class _Records:
    """The records among the lines that the reader prints of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._deep = 0
        self.too_long = 0

    def take_from(self, lines: Iterable[bytes], take: Callable[[dict[str, Any]], None]) -> None:
        """Hand those that may be needed to `take`, one after the other.

        Raises:
            ReadError: A line is no record.
        """
        for line in lines:
            if _UNUSED_RECORD.match(line):
                continue
            # What JSON becomes in memory is up to 25 times as large: of large lines there is one at a time.
            with _one_large_line if len(line) > _LARGE_LINE else nullcontext():
                record = self._parsed(line)
                if record is not None:
                    take(record)

    def problems(self, limits: Limits) -> list[str]:
        """What was passed over."""
        found = []
        if self.too_long:
            found.append(f"{self.too_long} of its records, of more than {limits.line} bytes, are passed over")
        if self._deep:
            found.append(f"{self._deep} of its records, with values too deep or too long for JSON, are passed over")
        return found

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        if is_deeper(line):
            self._deep += 1
            return None
        try:
            record = json.loads(line)
            contents = record[record["type"]]  # every record holds its contents under the name of its type
        except (ValueError, KeyError, TypeError):
            contents = None
        if not isinstance(contents, dict):
            raise ReadError(f"{self._path}: `wandb leet inspect` printed what is no record: {line[:80]!r}")
        parsed: dict[str, Any] = record
        return parsed


def _reader_failed(path: Path, returncode: int, said: str) -> ReadError | UnsupportedVersionError:
    # Exit code 2 is click's for bad usage, but also that of a Go program that crashed: over this file alone.
    if re.search(r"No such (?:command|option)|No module named '?wandb", said.replace(str(path), "")):
        return UnsupportedVersionError(
            f"The .wandb files cannot be read: {_installed_wandb()} has no `wandb leet inspect --json`, "
            f"which came with {_READER_SINCE}. Install it: pip install 'wandb>={_READER_SINCE}'"
        )
    return ReadError(
        f"{path}: `wandb leet inspect` cannot read it: {_essence(said)[:_LONGEST_PROBLEM] or f'exit code {returncode}'}"
    )


def _installed_wandb() -> str:
    try:
        return f"wandb {importlib.metadata.version('wandb')}"
    except importlib.metadata.PackageNotFoundError:
        return f"the Python at {sys.executable}"


def _essence(said: str) -> str:
    """The message within what a failing command said: without a traceback's frames, in one line."""
    lines = said.splitlines()
    for line in lines:  # of a program in Go, which then prints all its stacks
        if line.startswith(("fatal error: ", "panic: ")):
            limit = f" (it is given {Limits.memory // 2**20} MiB)" if "out of memory" in line else ""
            return f"{line}{limit}"
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :]).removeprefix("Error: ")


def _nothing_in(path: Path, problems: list[str]) -> str:
    size = path.stat().st_size
    if problems:
        return f"{path}: nothing of a run is left in its {size} bytes: {'; '.join(problems)}"
    reason = "is empty" if size == 0 else f"holds no run yet ({size} bytes)"
    return f"{path}: {reason}: the run was killed at its start, or has just begun"
