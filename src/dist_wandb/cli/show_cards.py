"""One run in full, as ``dist-wandb show`` prints it: its state, its writers and its metrics."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby, islice
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from dist_wandb.cli.command import Column, fitting, number, number_of, sparkline, table_of
from dist_wandb.errors import visible
from dist_wandb.reading.runs import LocalRun, Writer
from dist_wandb.reading.selection import SPREAD, by_rank, of_rank, spreads_among
from dist_wandb.reading.stragglers import EXCESS, RANK, Timing, findings
from dist_wandb.settings.reduction import STEP, TIMES
from dist_wandb.uploads.plan import is_uploaded
from dist_wandb.wandb_files.reading import MetricHistory, mean_of
from dist_wandb.wandb_files.stall_file import stalls_of

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


def card(run: LocalRun, patterns: Sequence[str], width: int) -> tuple[Text, RenderableType]:
    """Return the heading of a run, and the table of the metrics that match `patterns`, `width` characters wide."""
    return _heading(run), Padding(_metrics_table(run, patterns, width - _INDENT), (0, 0, 0, _INDENT), expand=False)


def _heading(run: LocalRun) -> Text:
    parts = [part for writer in run.writers for part in writer.parts]
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
    found = Text.assemble(("● ", style), (visible(run.id), "bold"), "  ", visible(run.name or ""))
    found.rstrip()
    ends = {"finished": "finished", "failed": f"failed (exit code {run.exit_code})"}
    state = ends.get(run.state, "no end recorded (running, or killed)")
    found.append("\n  ").append(state, style).append("".join(f" · {fact}" for fact in facts))
    if len(run.writers) == 1:
        for path in run.files:
            found.append("\n  ").append(visible(str(path.parent)), "dim")
        for problem in run.problems:
            found.append("\n  ").append(f"! {visible(problem)}", "yellow")
    else:
        _add_writers(found, run)
    for finding in findings(_timings_of(run.metrics), job.world_size if job else 0):
        found.append("\n  ").append(visible(finding), "bold red")
    stalls, count = stalls_of(part.directory for part in parts)
    for stall in stalls:
        style = "bold red" if stall.lasted is None else "yellow"
        found.append("\n  ").append("stood still", style).append(f" {visible(str(stall))}")
    if count > len(stalls):
        found.append(f"\n  and {number_of(count - len(stalls), 'earlier stall')}")
    return found


def _timings_of(metrics: Mapping[str, MetricHistory]) -> dict[str, Timing]:
    found = {STEP: Timing(rows=metrics[STEP].count)} if STEP in metrics else {}
    if RANK in metrics:
        excess = mean_of(metrics[EXCESS].trend) if EXCESS in metrics else math.nan
        found[RANK] = Timing(_counts(metrics[RANK]), metrics[RANK].count)
        found[RANK].mean = metrics[RANK].count * excess if math.isfinite(excess) else 0.0
    for name, spread in spreads_among(metrics).items():
        if name.startswith(TIMES):
            rows = metrics[name].count
            sums = (rows * mean_of(metric.trend) for metric in (spread["max"], metrics[name], spread["min"]))
            found[name] = Timing(_counts(spread["argmax_rank"]), rows, *sums)
    return found


def _counts(ranks: MetricHistory) -> Counter[int]:
    return Counter({int(rank): count for rank, count in ranks.counts})


def _add_writers(text: Text, run: LocalRun) -> None:
    """Add a line for each writer; if there are many, first for those that differ from the others."""
    notable = sorted(
        run.writers, key=lambda writer: not (writer.primary or writer.problems or writer.state != run.state)
    )
    shown = set(map(id, notable[:_MOST_WRITERS_SHOWN]))
    folders = [path.parent for path in run.files]
    if len({folder.is_absolute() for folder in folders}) > 1:
        folders = [folder.absolute() for folder in folders]
    top = Path(os.path.commonpath(folders))
    text.append("\n  ").append(visible(str(top)), "dim")
    labels = [writer.label or "without a label" for writer in run.writers if id(writer) in shown]
    room = max(map(len, labels), default=0)
    for writer in run.writers:
        if id(writer) not in shown:
            continue
        style, words = STATES[writer.state]
        text.append("\n  ").append("● ", style).append(f"{visible(writer.label or 'without a label'):<{room}}  ")
        text.append(", ".join(_facts_of_writer(writer, words)))
        for path in dict.fromkeys(part.path.parent for part in writer.parts):
            text.append(f"  {visible(os.path.relpath(path, top))}", "dim")
        for problem in writer.problems:
            text.append("\n    ").append(f"! {visible(problem)}", "yellow")
    if len(run.writers) > len(shown):
        text.append(f"\n  and {len(run.writers) - len(shown)} writers more")


def _facts_of_writer(writer: Writer, state: str) -> Iterator[str]:
    yield f"{state} (exit code {writer.parts[-1].exit_code})" if writer.state == "failed" else state
    yield number_of(writer.rows, "row")
    if writer.rank is not None:
        yield f"rank {writer.rank}"
    if writer.node is not None:
        yield f"node {writer.node}"
    if writer.primary:
        yield "primary"


def matching(metrics: Mapping[str, MetricHistory], patterns: Sequence[str]) -> dict[str, MetricHistory]:
    """Return the metrics whose names match a pattern, those of single ranks after the metric that they belong to."""
    return {name: metrics[name] for name in by_rank(metrics) if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _metrics_table(run: LocalRun, patterns: Sequence[str], width: int) -> RenderableType:
    """Return a table with one line per metric, which has its spread. Of many ranks, show the extremes."""
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
    has_more = any(part.has_more_metrics for writer in run.writers for part in writer.parts)
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
