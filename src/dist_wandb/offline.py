"""What lies on disk after offline runs: find the run files below a directory and read them back.

W&B ships no Python reader for its ``.wandb`` files, so they are read through ``wandb leet inspect --json``, one record
at a time: of a history of any length only running statistics and a bounded trend of each metric are kept.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from dist_wandb.errors import ReadError, UnsupportedVersionError
from dist_wandb.run import SIDECAR_NAME

SIDECAR_FORMAT = 1
"""The only sidecar format this version knows."""

TREND_LENGTH = 256
"""Largest number of points kept of a metric's history."""

RUN_RECORD_LOST = "its run record is lost"
"""How a problem of a file begins of which nothing tells which run it is."""

State = Literal["finished", "failed", "unfinished"]

_READER_SINCE = "0.31"  # `wandb leet inspect` is older, its --json is not
_RUN_FILE = re.compile(r"run-.+\.wandb")
_PARALLEL_READERS = 4  # each is a process of its own, of about half a second
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


def find_runs(directory: str | os.PathLike[str]) -> list[Path]:
    """Find the files of W&B runs below a directory, at any depth.

    Args:
        directory: Where to look: any directory, a run's own directory, or a single ``.wandb`` file. Symbolic links
            below it (W&B's ``latest-run``) are not followed.

    Returns:
        The ``run-ID.wandb`` files within ``run-*`` and ``offline-run-*`` directories, in natural order of their paths
        (``rank-2`` before ``rank-10``).

    Raises:
        ReadError: `directory` does not exist, cannot be entered, or is some other file.
    """
    top = Path(directory)
    if top.suffix == ".wandb" and top.is_file():
        return [top]
    try:
        os.listdir(top)  # noqa: PTH208  # os.walk would pass over an error in silence
    except OSError as error:
        raise ReadError(
            f"Cannot look for runs in {str(top)!r}: {error.strerror}. Give an existing directory."
        ) from None
    found = (Path(folder, name) for folder, _, names in os.walk(top) for name in names if _RUN_FILE.fullmatch(name))
    return sorted(filter(_is_in_run_directory, found), key=lambda path: natural_order(str(path)))


def natural_order(text: str) -> list[str]:
    """A sort key that puts ``rank-2`` before ``rank-10``."""
    return [part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", text)]


def read_run(path: str | os.PathLike[str]) -> StoredRun:
    """Read one ``.wandb`` file, and dist_wandb's sidecar beside it.

    ``run.finish()`` returns before the file is whole: for about a second the run may read as `"unfinished"`.

    Args:
        path: A ``.wandb`` file, as `find_runs` gives it.

    Returns:
        What the file holds. Parts of it that are damaged are skipped and named in `StoredRun.problems`.

    Raises:
        ReadError: Nothing of a run can be read from the file.
        UnsupportedVersionError: The installed wandb cannot read ``.wandb`` files for others.
    """
    path = Path(path)
    contents = _Contents()
    problems = _inspect(path, contents.take)
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


def read_runs(paths: Iterable[Path]) -> tuple[list[StoredRun], dict[Path, ReadError]]:
    """Read several ``.wandb`` files, a few at a time.

    Args:
        paths: The files, as `find_runs` gives them.

    Returns:
        The runs that could be read, in the order of `paths`, and for each other file the reason.

    Raises:
        UnsupportedVersionError: The installed wandb cannot read ``.wandb`` files for others.
    """
    paths = list(paths)
    with ThreadPoolExecutor(_PARALLEL_READERS) as readers:
        outcomes = list(readers.map(_run_or_error, paths))
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


def _read_rows(path: Path, take_row: Callable[[dict[str, Any]], None]) -> None:
    def take(record: dict[str, Any]) -> None:
        if record["type"] == "history":
            take_row({name: _with_floats(value) for name, value in record["history"].get("item", {}).items()})

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
        return _sidecar(json.loads(path.read_bytes()))
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
        raise ValueError(f"format {record.get('format')!r}, while this version reads {SIDECAR_FORMAT}")
    return Sidecar(**{field.name: _sidecar_value(record, field.name, str(field.type)) for field in fields(Sidecar)})


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
        raise ValueError(f"{name}={value!r}, which is no {annotation.replace('|', 'or')}")
    return value


def _is_in_run_directory(path: Path) -> bool:
    return path.parent.resolve().name.startswith(("run-", "offline-run-"))  # resolved: it may have been given as "."


def _run_or_error(path: Path) -> StoredRun | ReadError:
    try:
        return read_run(path)
    except ReadError as error:
        return error


class _Contents:
    """What the records of one file add up to."""

    def __init__(self) -> None:
        self.run: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.rows = 0
        self.metrics: dict[str, _Metric] = {}

    def take(self, record: dict[str, Any]) -> None:
        """Add one record; kinds that tell nothing of interest are passed over."""
        kind = record["type"]
        if kind == "history":
            self._take_row(record["history"].get("item", {}))
        elif kind == "run":  # written again whenever name, tags or notes change: the last one holds
            self.run = record["run"]
            self.config.update(self.run.get("config", {}).get("update", {}))
        elif kind == "config":
            self.config.update(record["config"].get("update", {}))
        elif kind == "exit":
            self.exit_code = record["exit"].get("exit_code", 0)

    def as_run(self, path: Path, sidecar: Sidecar | None, problems: list[str]) -> StoredRun:
        return StoredRun(
            path=path,
            run_id=self.run.get("run_id") or path.stem.removeprefix("run-"),
            name=self.run.get("display_name"),
            project=self.run.get("project"),
            group=self.run.get("run_group"),
            job_type=self.run.get("job_type"),
            tags=tuple(self.run.get("tags", ())),
            config={name: value for name, value in self.config.items() if name != "_wandb"},
            started=self.run.get("start_time"),
            exit_code=self.exit_code,
            rows=self.rows,
            metrics={name: self.metrics[name].summed_up() for name in sorted(self.metrics, key=natural_order)},
            sidecar=sidecar,
            problems=tuple(problems),
        )

    def _take_row(self, row: dict[str, Any]) -> None:
        self.rows += 1
        media = tuple(
            name.removesuffix("_type")
            for name, kind in row.items()
            if name.endswith("._type") and isinstance(kind, str)
        )
        for name, value in row.items():
            number = _with_floats(value)
            if isinstance(number, bool) or not isinstance(number, int | float) or name.startswith(("_", *media)):
                continue
            if name not in self.metrics:
                self.metrics[name] = _Metric()
            self.metrics[name].take(number)


class _Metric:
    """Running statistics of one metric."""

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

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._length = 1  # of every stretch, but for the last, of which there is only this much:
        self._length_of_last = 0

    def take(self, value: float) -> None:
        if not self._stretches or self._length_of_last == self._length:
            if len(self._stretches) == TREND_LENGTH:
                self._merge_neighbours()
            self._stretches.append(_Stretch())
            self._length_of_last = 0
        self._length_of_last += 1
        if math.isfinite(value):
            self._stretches[-1].add(1, float(value))

    def means(self) -> tuple[float, ...]:
        return tuple(stretch.mean for stretch in self._stretches)

    def _merge_neighbours(self) -> None:
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [left.merged_with(right) for left, right in pairs]
        self._length *= 2


@dataclass
class _Stretch:
    """The mean of the finite values of a stretch, and their number."""

    finite: int = 0
    mean: float = math.nan

    def merged_with(self, other: _Stretch) -> _Stretch:
        merged = _Stretch(self.finite, self.mean)
        if other.finite:
            merged.add(other.finite, other.mean)
        return merged

    def add(self, finite: int, mean: float) -> None:
        share = finite / (self.finite + finite)
        self.mean = self.mean * (1 - share) + mean * share if self.finite else mean  # a sum of values could overflow
        self.finite += finite


def _with_floats(value: Any) -> Any:
    """A row's value; strings that stand for NaN and infinity, and integers beyond any float, made floats."""
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.inf if value > 0 else -math.inf
    return value


def _inspect(path: Path, take: Callable[[dict[str, Any]], None]) -> list[str]:
    """Hand the records of a file, but for `_UNUSED_RECORD`, to `take`, one after the other.

    Returns:
        What the reader complained about: damaged parts that it skipped.

    Raises:
        ReadError: The reader refused the file, or the file is no file.
        UnsupportedVersionError: There is no such reader in the installed wandb.
    """
    if not path.is_file():
        raise ReadError(f"{path}: is not a file. Give a .wandb file, as find_runs() finds them.")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", f"./{path.name}"]
    # In the file's own folder, because `python -m` would import modules of that name from the current one.
    with tempfile.TemporaryFile() as complaints:
        with subprocess.Popen(  # noqa: S603  # the interpreter that runs this, no shell
            command, cwd=path.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=complaints
        ) as reader:
            for record in _parsed(path, reader.stdout or ()):
                take(record)
        complaints.seek(0)
        said = complaints.read().decode("utf-8", errors="replace").strip()
    if reader.returncode:
        raise _reader_failed(path, reader.returncode, said)
    complaint = "wandb leet inspect: "  # other lines are warnings of Python's or wandb's about themselves
    return [line.removeprefix(complaint) for line in said.splitlines() if line.startswith(complaint)]


def _parsed(path: Path, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if _UNUSED_RECORD.match(line):
            continue
        try:
            record = json.loads(line)
            record[record["type"]]  # every record holds its contents under the name of its type
        except (ValueError, KeyError, TypeError):
            raise ReadError(f"{path}: `wandb leet inspect` printed what is no record: {line[:80]!r}") from None
        yield record


def _reader_failed(path: Path, returncode: int, said: str) -> ReadError | UnsupportedVersionError:
    if returncode == 2 or "No module named" in said:  # noqa: PLR2004  # click's code for bad usage: an older wandb
        return UnsupportedVersionError(
            f"The .wandb files cannot be read: {_installed_wandb()} has no `wandb leet inspect --json`, "
            f"which came with {_READER_SINCE}. Install it: pip install 'wandb>={_READER_SINCE}'"
        )
    return ReadError(f"{path}: `wandb leet inspect` cannot read it: {_essence(said) or f'exit code {returncode}'}")


def _installed_wandb() -> str:
    try:
        return f"wandb {importlib.metadata.version('wandb')}"
    except importlib.metadata.PackageNotFoundError:
        return f"the Python at {sys.executable}"


def _essence(said: str) -> str:
    """The message within what a failing command said: without a traceback's frames, in one line."""
    lines = said.splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(line.strip() for line in lines[starts[-1] if starts else 0 :]).removeprefix("Error: ")


def _nothing_in(path: Path, problems: list[str]) -> str:
    size = path.stat().st_size
    if problems:
        return f"{path}: nothing of a run is left in its {size} bytes: {'; '.join(problems)}"
    reason = "is empty" if size == 0 else f"holds no run yet ({size} bytes)"
    return f"{path}: {reason}: the run was killed at its start, or has just begun"
