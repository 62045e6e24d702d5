"""One run in full, as ``dist-wandb show`` prints it, once or while it grows: its state, its writers and its metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, islice
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from dist_wandb.cli.command import Column, fitting, number, number_of, sparkline, table_of
from dist_wandb.cli.uploads.plan import is_uploaded
from dist_wandb.errors import DistWandbError, in_words, visible
from dist_wandb.wandb_files.finding import files_below
from dist_wandb.wandb_files.reading import MetricColumns, MetricHistory, StoredRun
from dist_wandb.wandb_files.records import PAUSE, read_records
from dist_wandb.wandb_files.runs import LocalRun, brought_together, parts_of
from dist_wandb.wandb_files.selection import SPREAD, by_rank, of_rank, spreads_among, timings_of
from dist_wandb.wandb_files.sidecar import stalls_of
from dist_wandb.wandb_files.small_files import Directory
from dist_wandb.wandb_files.stragglers import findings

SPARKLINE_WIDTH = 32  # maximum length of a sparkline in characters; less on a narrow terminal
STATES = {  # color and description, by state of a run
    "finished": ("green", "finished"),
    "failed": ("red", "failed"),
    "unfinished": ("yellow", "without a recorded end"),
}

_SHORTEST_SPARKLINE = 8
_COLUMN_GAP = 2
_SHORTEST_NAME = 12  # characters of a line of a metric's name
_RANKS = {"trend": 1, "NaN/inf": 2, "last over ranks": 3, "max": 4, "min": 5, "values": 6}  # as in `Column`
_MOST_METRICS_SHOWN = 1000  # of one run
_MOST_WRITERS_SHOWN = 16
_MOST_RANKS_SHOWN = 16  # of one metric
_INDENT = 2

_INTERVAL = 1.0  # seconds between two updates
_SEARCH = 5.0  # seconds between two searches for files of ranks that start later
_LATE_ENDS = 20.0  # seconds to wait for the ends of writers after the end of their run
_IDLE_TIMEOUT = 6 * 3600.0  # seconds without new records of a run, which was abandoned
_MOST_FILES = 256
_METRICS_IN_LINE = 4


def card(run: LocalRun, patterns: Sequence[str], width: int) -> tuple[Text, RenderableType]:
    """Return the heading of a run, and the table of the metrics that match `patterns`, `width` characters wide."""
    return _heading(run), Padding(_metrics_table(run, patterns, width - _INDENT), (0, 0, 0, _INDENT), expand=False)


def _heading(run: LocalRun) -> Text:
    parts = parts_of(run)
    job = run.writers[0].parts[-1].sidecar
    style, _ = STATES[run.state]
    facts = [number_of(run.rows, "row")]
    facts += ["uploaded"] if all(map(is_uploaded, parts)) else []
    facts += [f"{what} {visible(value)}" for what, value in (("project", run.project), ("group", run.group)) if value]
    if job is not None:
        facts.append(f"{job.run_mode}/{job.rank_scope}")
        if len(run.writers) > 1:
            facts.append(f"{len(run.writers)} writers of {number_of(job.world_size, 'rank')}")
        else:
            facts.append(f"rank {job.global_rank} of {job.world_size}")
            if job.label is not None:
                facts.append(f"label {visible(job.label)}{' (primary)' if job.primary else ''}")
    title = Text.assemble(("● ", style), (visible(run.id), "bold"), "  ", visible(run.name or ""))
    title.rstrip()
    ends = {"finished": "finished", "failed": f"failed (exit code {run.exit_code})"}
    state = ends.get(run.state, "no end recorded (running, or killed)")
    lines = [title, Text.assemble((state, style), *(f" · {fact}" for fact in facts))]
    if len(run.writers) == 1:
        lines += [Text(visible(str(path.parent)), "dim") for path in run.files]
        lines += [Text(f"! {visible(problem)}", "yellow") for problem in run.problems]
    else:
        lines += _lines_of_writers(run)
    lines += [Text(visible(one), "bold red") for one in findings(timings_of(run.metrics), job.world_size if job else 0)]
    stalls, count = stalls_of(part.directory for part in parts)
    for stall in stalls:
        style = "bold red" if stall.lasted is None else "yellow"
        lines.append(Text.assemble(("stood still", style), f" {visible(str(stall))}"))
    if count > len(stalls):
        lines.append(Text(f"and {number_of(count - len(stalls), 'earlier stall')}"))
    return Text("\n  ").join(lines)


def _lines_of_writers(run: LocalRun) -> Iterator[Text]:
    """Yield a line for each writer; of many, for some, first for those that differ from the others."""
    notable = sorted(run.writers, key=lambda one: not (one.primary or one.problems or one.state != run.state))
    shown = [writer for writer in run.writers if writer in notable[:_MOST_WRITERS_SHOWN]]
    folders = [path.parent for path in run.files]
    if len({folder.is_absolute() for folder in folders}) > 1:
        folders = [folder.absolute() for folder in folders]
    top = Path(os.path.commonpath(folders))
    yield Text(visible(str(top)), "dim")
    room = max(len(writer.label or "without a label") for writer in shown)
    for writer in shown:
        style, words = STATES[writer.state]
        facts = [f"{words} (exit code {writer.parts[-1].exit_code})" if writer.state == "failed" else words]
        facts += [number_of(writer.rows, "row")]
        facts += [
            f"{what} {value}" for what, value in (("rank", writer.rank), ("node", writer.node)) if value is not None
        ]
        facts += ["primary"] * writer.primary
        of_writer = f"{visible(writer.label or 'without a label'):<{room}}  {', '.join(facts)}"
        paths = dict.fromkeys(part.path.parent for part in writer.parts)
        where = "".join(f"  {visible(os.path.relpath(path, top))}" for path in paths)
        yield Text.assemble(("● ", style), of_writer, (where, "dim"))
        yield from (Text(f"  ! {visible(problem)}", "yellow") for problem in writer.problems)
    if len(run.writers) > len(shown):
        yield Text(f"and {len(run.writers) - len(shown)} writers more")


def matching(metrics: Mapping[str, MetricHistory], patterns: Sequence[str]) -> dict[str, MetricHistory]:
    """Return the metrics whose names match a pattern, those of single ranks after the metric that they belong to."""
    return {name: metrics[name] for name in by_rank(metrics) if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _metrics_table(run: LocalRun, patterns: Sequence[str], width: int) -> RenderableType:
    wanted = matching(run.metrics, patterns)
    spreads = spreads_among(wanted) if list(patterns) == ["*"] else {}
    folded = {f"{name}/{kind}" for name in spreads for kind in SPREAD}
    wanted = {name: metric for name, metric in wanted.items() if name not in folded}
    if not wanted:
        was_any_logged = run.metrics or list(patterns) != ["*"]
        return Text("no metric matches" if was_any_logged else "no metric was logged", "dim")
    chosen = dict(islice(_without_middle_ranks(wanted), _MOST_METRICS_SHOWN))
    lines = {name: metric for name, metric in chosen.items() if isinstance(metric, MetricHistory)}
    texts = {
        "metric": [visible(name) for name in lines],
        "last": [number(metric.last) for metric in lines.values()],
        "min": [number(metric.smallest) for metric in lines.values()],
        "max": [number(metric.largest) for metric in lines.values()],
        "last over ranks": [_spread_in_words(spreads[name]) if name in spreads else "" for name in lines],
        "values": [str(metric.count) for metric in lines.values()],
        "NaN/inf": [str(metric.not_finite or "") for metric in lines.values()],
        "trend": ["x" * _SHORTEST_SPARKLINE] * len(lines),
    }
    columns = [
        Column(title, list(map(Text, cells)), _RANKS.get(title, 0), "left" if title in ("metric", "trend") else "right")
        for title, cells in texts.items()
        if any(cells)
    ]
    name, *_ = columns
    columns[0] = name._replace(width=min(name.room - _COLUMN_GAP, max(_SHORTEST_NAME, width // 2)))
    fits, notes = fitting(columns, width)
    room = width - sum(column.room for column in fits[1:])
    fits[0] = name._replace(width=max(_SHORTEST_NAME, min(name.room - _COLUMN_GAP, room)))
    if fits[-1].title == "trend":
        room = min(SPARKLINE_WIDTH, _SHORTEST_SPARKLINE + max(0, room - fits[0].room + _COLUMN_GAP))
        trends = [Text(sparkline(metric.trend, room), "cyan") for metric in lines.values()]
        fits[-1] = fits[-1]._replace(cells=trends)
    shown = table_of(fits)
    notes += [Text(note, "dim") for note in chosen.values() if isinstance(note, str)]
    more = len(wanted) - len(chosen) if len(chosen) == _MOST_METRICS_SHOWN else 0
    has_more = any(part.has_more_metrics for part in parts_of(run))
    if more or has_more:
        many = f"more than {more}" if has_more else str(more)
        notes.append(Text(f"and {many} beyond these: --metric GLOB picks", "dim"))
    return Group(shown, *notes) if notes else shown


def _spread_in_words(spread: Mapping[str, MetricHistory]) -> str:
    smallest, largest = number(spread["min"].last), number(spread["max"].last)
    return f"{smallest} to {largest} (rank {number(spread['argmax_rank'].last)})"


def _without_middle_ranks(metrics: Mapping[str, MetricHistory]) -> Iterator[tuple[str, MetricHistory | str]]:
    """Yield metrics. For a name of very many ranks, yield those with the lowest and highest last values, and a note."""
    for base, names in groupby(metrics, key=lambda name: (of_rank(name) or (None, None))[1]):
        group = list(names)
        if base is None or len(group) <= _MOST_RANKS_SHOWN:
            yield from ((name, metrics[name]) for name in group)
            continue
        by_last = sorted(group, key=lambda name: metrics[name].last)
        half = _MOST_RANKS_SHOWN // 2
        yield from ((name, metrics[name]) for name in (*by_last[:half], *by_last[-half:]))
        note = f"{visible(base)}: of {len(group)} ranks those with the {half} lowest and highest last values are shown"
        yield f"\0{base}", note


# --- runs whose files grow: --follow ----------------------------------------------------------------------------------


def started_last(directories: Sequence[Path]) -> set[str]:
    """Return the name of the file that was started last, by the names of directories: it may have no record yet."""
    files = files_below(directories)[0]
    return {path.name for path in sorted(files, key=lambda path: path.parent.name.removeprefix("offline-"))[-1:]}


def follow(directories: Sequence[Path], names: set[str], patterns: Sequence[str], out: Console) -> list[LocalRun]:
    # Shows cards on a terminal, else a line for each change. Returns their last state.
    runs: list[LocalRun] = []
    if not out.is_terminal:
        for runs in _states(directories, names, patterns):
            _print_lines(out, runs, patterns)
        return runs
    with Live(console=out, auto_refresh=False, transient=True) as live:
        for runs in _states(directories, names, patterns):
            live.update(Group(*(part for run in runs for part in card(run, patterns, out.width))), refresh=True)
    return runs


def _states(directories: Sequence[Path], names: set[str], metrics: Sequence[str]) -> Iterator[list[LocalRun]]:
    """Yield the runs of the files, also of ranks that start later, after each change until the end."""
    files: dict[Path, _FollowedFile] = {}
    runs: list[LocalRun] = []
    searched = changed = -_SEARCH
    are_complete = False  # whether all readable files have a record, and all writers have ended
    while True:
        now = time.monotonic()
        if now - searched >= _SEARCH:
            for path, directory in files_below(directories)[0].items():
                if path.name in names and path not in files and len(files) < _MOST_FILES:
                    files[path] = _FollowedFile(path, directory, metrics)
            searched = now
        if sum(file.read_on() for file in files.values()):
            begun = [file for file in files.values() if file.record]
            for file in begun:
                file.end()
            runs, changed = brought_together(begun), now
            have_begun = all(file.record or file.is_read for file in files.values())
            are_complete = have_begun and all(w.state != "unfinished" for run in runs for w in run.writers)
            yield runs
        has_ended = bool(runs) and all(run.state != "unfinished" for run in runs)
        if has_ended and (are_complete or now - changed > _LATE_ENDS):
            return
        if files and all(file.is_read for file in files.values()):
            if errors := [in_words(file.error, file.path) for file in files.values() if file.error]:
                raise DistWandbError("; ".join(errors))
            return
        time.sleep(_INTERVAL)


class _FollowedFile(StoredRun):
    """One file, which is read while it grows."""

    def __init__(self, path: Path, directory: Directory, metrics: Iterable[str]) -> None:
        super().__init__(path, directory, columns=MetricColumns(metrics))
        self.error: Exception | None = None  # why the file was not read to its end
        self.is_read: bool = False  # whether the run has ended, or cannot be read, or nothing was added for hours
        self._records = read_records(path, follow=True, within=directory)
        self._changed = time.monotonic()

    def read_on(self) -> bool:  # whether there were new records
        has_records = False
        try:
            while not self.is_read and (record := next(self._records)) is not PAUSE:
                self.add(record)
                has_records = True
                self.is_read = self.exit_code is not None
        except Exception as error:  # noqa: BLE001  # printed at the end
            self.error, self.is_read = error, True
        self._changed = time.monotonic() if has_records else self._changed
        self.is_read |= time.monotonic() - self._changed > _IDLE_TIMEOUT
        return has_records


def _print_lines(out: Console, runs: Iterable[LocalRun], patterns: Sequence[str]) -> None:
    for run in runs:
        metrics = islice(matching(run.metrics, patterns).items(), _METRICS_IN_LINE)
        values = "".join(f" · {visible(name)} {number(metric.last)}" for name, metric in metrics)
        state = STATES[run.state][1] if run.state != "unfinished" else "goes on"
        line = f"{time.strftime('%H:%M:%S')}  {visible(run.id)}  {state} · {number_of(run.rows, 'row')}{values}"
        out.print(Text(line), soft_wrap=True)
    out.file.flush()
