"""`read_runs`: read the runs below a directory. The files of a shared or resumed run are one run.

Rows are read as columns, of which only the requested ones are kept.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property, lru_cache
from html import escape
from pathlib import Path
from typing import Any

from dist_wandb.errors import ConfigurationError, MissingExtraError, ReadError, suggest, visible
from dist_wandb.wandb_files import reading
from dist_wandb.wandb_files.finding import files_below, natural_order, path_order
from dist_wandb.wandb_files.records import read_records

_log = logging.getLogger("dist_wandb")

_WORST_FIRST: tuple[reading.State, ...] = ("unfinished", "failed", "finished")
_LONGEST_NAME = 1000  # characters


@dataclass(frozen=True)
class Writer:
    """The part of a run that one process has written: one file, or several after restarts."""

    label: str | None  # name within a shared run; `None` in an ordinary run
    rank: int | None  # global rank; `None` if the run was not written by dist_wandb
    node: int | None  # rank of the node, if known
    primary: bool  # whether the writer wrote the plain names of the run
    parts: tuple[reading.StoredRun, ...] = field(repr=False)  # the writer's files, in the order of their starts

    @property
    def path(self) -> Path:
        """Path of the last ``.wandb`` file."""
        return self.parts[-1].path

    @property
    def state(self) -> reading.State:
        """How the last file ends: `"finished"`, `"failed"` or `"unfinished"` (running, or killed)."""
        return self.parts[-1].state

    @property
    def rows(self) -> int:
        """Number of history rows."""
        return sum(part.rows for part in self.parts)

    @property
    def problems(self) -> tuple[str, ...]:
        """Damaged parts of the files, each as a sentence fragment."""
        return tuple(problem for part in self.parts for problem in part.problems)

    @cached_property
    def metrics(self) -> dict[str, reading.MetricHistory]:
        """Statistics and trend of each numeric metric."""
        found: dict[str, list[reading.MetricHistory]] = defaultdict(list)
        for part in self.parts:
            for name, metric in part.metrics.items():
                found[name].append(metric)
        return {name: reading.joined(found[name]) for name in sorted(found, key=natural_order)}


@dataclass(frozen=True)
class LocalRun:
    """One W&B run on disk, in one file or several. The history is not kept in memory.

    Args:
        id: Id of the run.
        name: Display name; `None` if W&B chooses it at the upload.
        project: Project of the run.
        group: Group of the run.
        job_type: Job type of the run.
        tags: Tags of the run.
        config: Last configuration of the run.
        started: Start time in W&B's format (ISO 8601, UTC); `None` if it is lost.
        step_axis: Name of the x axis, such as ``global_step``; ``_step``, W&B's count of rows, if none is defined.
        writers: The writers, the primary first: one for an ordinary run, one for each rank of a shared run.

    Examples:
        >>> for run in dist_wandb.read_runs("wandb"):
        ...     losses = run.history("train/loss")["train/loss"]
        ...     print(run.id, run.state, run.config.get("lr"), losses[-1])
    """

    id: str
    name: str | None
    project: str | None
    group: str | None
    job_type: str | None
    tags: tuple[str, ...]
    config: dict[str, Any]
    started: str | None
    step_axis: str
    writers: tuple[Writer, ...]

    @property
    def state(self) -> reading.State:
        """How the run ended: the state of its primary, or the worst state of its writers without the primary's file."""
        if self.writers[0].primary or len(self.writers) == 1:
            return self.writers[0].state
        return min((writer.state for writer in self.writers), key=_WORST_FIRST.index)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the writer that determines `state`; `None` if no end is recorded."""
        return next(writer.parts[-1].exit_code for writer in self.writers if writer.state == self.state)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the writers of a shared run."""
        return tuple(writer.label for writer in self.writers if writer.label is not None)

    @property
    def files(self) -> tuple[Path, ...]:
        """The ``.wandb`` files of the run."""
        return tuple(part.path for part in parts_of(self))

    @property
    def rows(self) -> int:
        """Number of history rows of all writers."""
        return sum(writer.rows for writer in self.writers)

    @property
    def problems(self) -> tuple[str, ...]:
        """Damaged parts of the files, each as a sentence fragment."""
        return tuple(problem for writer in self.writers for problem in writer.problems)

    @cached_property
    def metrics(self) -> dict[str, reading.MetricHistory]:
        """Statistics and trend of each numeric metric; if several writers wrote a name, those of the first one."""
        found: dict[str, reading.MetricHistory] = {}
        for writer in self.writers:
            found = {**writer.metrics, **found}
        return {name: found[name] for name in sorted(found, key=natural_order)}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The last value of each name, and the values set in ``run.summary``. Files are read at the first use.

        Raises:
            ReadError: See `history`.
        """
        summary: dict[str, Any] = {}
        for part in (part for writer in reversed(self.writers) for part in writer.parts):  # later values replace others
            for kind, contents in read_records(part.path, skipped=("stats", "output_raw"), within=part.directory):
                changes = contents if kind == "summary" else {}
                # A killed process may have written no summary of its last rows.
                update = contents if kind == "history" else changes.get("update", {})
                for name, value in update.items():
                    is_kept = name in summary or len(summary) < reading.MOST_METRICS
                    if name[:1] != "_" and is_kept and len(name) <= _LONGEST_NAME:
                        summary[name] = value
                for name in changes.get("remove", ()):
                    summary.pop(name, None)
        return summary

    def history(
        self, names: str | Iterable[str] | None = None, *, writer: str | int | None = None
    ) -> dict[str, list[Any]]:
        """Read history rows as columns. The files are read again, and only the requested columns are kept.

        Args:
            names: A name, names, or patterns such as ``val/*``. `None` for all except W&B's own, such as ``_runtime``.
            writer: Label or rank of one writer of a shared run. `None` for all, one after the other, the primary first.

        Returns:
            A list for the x axis (`step_axis`), and one for each name, of equal length: one item for each row that
            contains one of the names, `None` if the row lacks the value. NaN and infinities are floats.

        Raises:
            ConfigurationError: There is no such writer.
            ReadError: A file is missing or cannot be read, or more than 50 million values are requested.
        """
        wanted = [names] if isinstance(names, str) else None if names is None else list(names)
        found = [each for each in self.writers if writer is None or writer in (each.label, each.rank)]
        if not found:
            ranks = [str(each.rank) for each in self.writers if each.rank is not None]
            known = suggest(writer, [*self.labels, *ranks])
            raise ConfigurationError(f"Run {self.id!r} has no writer {writer!r}. {known}")
        return columns_of((part for each in found for part in each.parts), self.step_axis, wanted)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<dist_wandb.LocalRun {self.id!r}{name} {self.state}, {self.rows} rows>"

    def _repr_html_(self) -> str:
        return LocalRuns([self])._repr_html_()  # IPython's name

    def to_pandas(self, names: str | Iterable[str] | None = None, *, writer: str | int | None = None) -> Any:
        """Return the result of `history` as a `pandas.DataFrame`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return _library("pandas").DataFrame(self.history(names, writer=writer))

    def to_polars(self, names: str | Iterable[str] | None = None, *, writer: str | int | None = None) -> Any:
        """Return the result of `history` as a `polars.DataFrame`. A column of several types gets a common type.

        Raises:
            MissingExtraError: polars is not installed.
        """
        polars = _library("polars")
        return polars.DataFrame(self.history(names, writer=writer), strict=False, infer_schema_length=None)


class LocalRuns(list[LocalRun]):
    """A list of runs that is shown with a line for each, and as a table in notebooks."""

    def __repr__(self) -> str:
        lines = ",\n ".join(map(repr, self))
        return f"[{lines}]"

    def _repr_html_(self) -> str:
        titles = ("id", "name", "group", "state", "started", "rows")
        rows = [titles, *([str(getattr(run, title) or "") for title in titles] for run in self)]
        cells = ["".join(f"<td>{escape(visible(cell))}</td>" for cell in row) for row in rows]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def read_runs(
    directory: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    metrics: Iterable[str] = ("*",),
    report: Callable[[ReadError], None] | None = None,
) -> list[LocalRun]:
    """Read the W&B runs below a directory, written offline or online, by dist_wandb or by wandb alone.

    Neither an account nor a network is needed. The files may come from an untrusted
    source: see docs/security.md.

    Args:
        directory: Directory to search, at any depth; or one ``.wandb`` file; or several of these.
        metrics: Patterns such as ``val/*``; `LocalRun.metrics` contains only names that match one of them.
            `LocalRun.history` is not affected.
        report: Called for each file and directory that cannot be read. Logged as warnings if `None`.

    Returns:
        The runs by their start, the oldest first. All files of a run are one run: the files of all writers of a shared
        run, and those of all starts of a resumed run.

    Raises:
        ReadError: A directory does not exist, or contains no run.
    """
    directories = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    files, errors = runs_below([Path(each) for each in directories], tuple(metrics))
    for _, error in errors:
        if report is not None:
            report(error)
        else:
            _log.warning("dist_wandb: %s", error)
    return LocalRuns(brought_together(files))


def runs_below(
    directories: Sequence[Path], metrics: Sequence[str] | None = ("*",)
) -> tuple[list[reading.StoredRun], list[tuple[Path, ReadError]]]:
    """Read the run files below directories; return the runs and what could not be read. Raises as `files_below`."""
    files, unseen = files_below(directories)
    runs, unreadable = reading.read_each(files, lambda path, directory: reading.read_run(path, directory, metrics))
    return runs, unreadable + unseen


def brought_together(files: Iterable[reading.StoredRun]) -> list[LocalRun]:
    """Group files into runs, the oldest run first."""
    together: dict[tuple[str | None, str], list[reading.StoredRun]] = defaultdict(list)
    for file in files:
        together[file.project, file.run_id].append(file)
    runs = [_run_of(parts) for parts in together.values()]
    return sorted(runs, key=lambda run: (run.started or "", path_order(run.files[0])))


def _run_of(files: Sequence[reading.StoredRun]) -> LocalRun:
    by_label: dict[str | None, list[reading.StoredRun]] = defaultdict(list)
    for file in sorted(files, key=lambda file: (file.started or "", path_order(file.path))):
        by_label[file.shared_as.label if file.shared_as else None].append(file)
    writers = []
    for label, own in by_label.items():
        job, shared = own[-1].sidecar, own[-1].shared_as
        rank, node = (job.global_rank, job.node_rank) if job else (None, None)
        writers.append(Writer(label, rank, node, shared.primary if shared else True, tuple(own)))
    writers.sort(key=lambda one: (not one.primary, one.rank is None, one.rank or 0))
    parts = [part for writer in writers for part in reversed(writer.parts)]  # in order of precedence
    config: dict[str, Any] = {}
    for part in reversed(parts):
        config.update(part.config)

    def first(name: str) -> Any:
        return next((value for part in parts if (value := getattr(part, name))), None)

    return LocalRun(
        id=parts[0].run_id,
        name=first("name"),
        project=parts[0].project,
        group=first("group"),
        job_type=first("job_type"),
        tags=first("tags") or (),
        config=config,
        started=min((part.started for part in parts if part.started), default=None),
        step_axis=first("step_axis") or "_step",
        writers=tuple(writers),
    )


def parts_of(run: LocalRun) -> list[reading.StoredRun]:
    return [part for writer in run.writers for part in writer.parts]


def columns_of(files: Iterable[reading.StoredRun], axis: str, names: Sequence[str] | None) -> dict[str, list[Any]]:
    # The first column is the x axis. `names` may be patterns such as ``val/*``; `None` for all except W&B's own, which
    # start with an underscore. A row without a requested value other than the x axis is skipped.
    patterns = ["[!_]*"] if names is None else [name for name in names if re.search(r"[*?\[]", name)]
    columns: dict[str, list[Any]] = {axis: [], **{name: [] for name in names or () if name not in patterns}}
    choices = [*map(translate, patterns), *map(re.escape, patterns)]  # a name may look like a pattern
    is_wanted = lru_cache(reading.MOST_METRICS)(re.compile("|".join(choices) or "(?!)").fullmatch)
    count = 0

    def check() -> None:
        if len(columns) > reading.MOST_METRICS + 1:
            raise ReadError(f"More than {reading.MOST_METRICS} names match. Request fewer names.")
        if count * len(columns) > reading.MOST_VALUES:
            raise ReadError(
                f"{count} rows of {len(columns)} names are more than {reading.MOST_VALUES} values. Request fewer "
                "names, or one writer."
            )

    for file in files:
        for row in reading.rows_in(file.path, file.directory):
            wanted = [name for name in row if name in columns or (len(name) <= _LONGEST_NAME and is_wanted(name))]
            if not wanted or wanted == [axis]:
                continue
            for name in wanted:
                if name not in columns:
                    columns[name] = []
                    check()  # before it is filled
                column = columns[name]
                column.extend([None] * (count - len(column)))
                column.append(row[name])
            count += 1
            check()
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return columns


def rows_of(run: LocalRun, names: Sequence[str], found: set[str]) -> Iterator[list[Any]]:
    # Yields rows that have another one of the names than the first, which is the x axis. Names that have values are
    # added to `found`.
    for part in parts_of(run):
        for row in reading.rows_in(part.path, part.directory):
            if any(name in row for name in names[1:]):
                found.update(name for name in names if row.get(name) is not None)
                yield [row.get(name) for name in names]


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingExtraError(
            f"to_{name} needs {name}, which is not installed. Run: pip install {name}. "
            "history() returns the same columns without it."
        ) from None
