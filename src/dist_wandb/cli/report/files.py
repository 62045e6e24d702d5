"""Read one ``.wandb`` file for a report, and turn its history rows into curves."""

from __future__ import annotations

import math
import re
import shlex
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from fnmatch import translate
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dist_wandb.cli.report.media import KINDS_OF_MEDIA, MOST_MEDIA, STEPS, Logged, cell_text
from dist_wandb.cli.report.page import Part, plain
from dist_wandb.cli.report.thinning import Blame, Budget, Curve, Numbers
from dist_wandb.settings.config_values import HIDDEN, is_secret, redacted, without_passwords
from dist_wandb.settings.reduction import BUSY, DEGRADED, TIMES, Definitions
from dist_wandb.wandb_files.reading import MetricColumns, StoredRun, numbers_and_media
from dist_wandb.wandb_files.records import Record
from dist_wandb.wandb_files.small_files import Directory
from dist_wandb.wandb_files.stragglers import RANK

MOST_NAMES = 2000  # largest number of metrics that the page shows of one file
_LONGEST_NAME = 200  # characters
_MOST_SPANS = 50
_MOST_BLAMES = 200
TIME = "_timestamp"  # W&B's name of the time of a row, in seconds since the epoch
MAIN_AXES = ("global_step", "trainer/global_step", "_step")
_ARGMAX = "/argmax_rank"
_STRAGGLER = "/straggler_rank"
_OF_RANKS = re.compile("/(max|step|straggler_excess)$")

_MOST_LINES = 1000  # of the console
_LONGEST_LINE = 500  # characters
_LONGEST_PENDING = 64 * 1024
_MOST_SYSTEM = 500  # metrics of one file
_LABEL = re.compile(r"/l:.*$", re.DOTALL)  # W&B adds it to the names of a shared writer's system metrics
_NUMBERED = re.compile(r"^(.*?)\.(\d{1,4})(?=\.|$)(.*)$", re.DOTALL)


def _degraded(missing: Numbers, x: Numbers) -> Part:
    """Return the rows, with positions `x`, to which some ranks did not contribute: `missing` is their number."""
    is_degraded = missing > 0
    changes = np.diff(is_degraded.astype(int), prepend=0, append=0)
    starts, ends = np.flatnonzero(changes == 1)[:_MOST_SPANS], np.flatnonzero(changes == -1)
    ends = np.append(ends[: max(0, len(starts) - 1)], ends[-1:])  # the last span that is kept includes all later ones
    spans = [x[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
    most = int(min(missing[is_degraded].max(initial=0), 1e9))
    return {"rows": int(is_degraded.sum()), "most": most, "spans": [(min(span), max(span)) for span in spans]}


class ConsoleTail:
    """Assembles pieces of console output into lines, as a terminal without colors would show them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.count: int = 0  # number of all lines, including those that were dropped
        self._pending = ""

    def add(self, text: str) -> None:  # which may start and end in the middle of a line
        *ended, self._pending = (self._pending + text).split("\n")
        if len(self._pending) > _LONGEST_PENDING:
            ended.append(self._pending)
            self._pending = ""
        self.count += len(ended)
        self.lines.extend(plain(line.rstrip("\r").rpartition("\r")[2])[:_LONGEST_LINE] for line in ended)

    def end(self) -> None:
        if self._pending:
            self.add("\n")


class FileForReport(StoredRun):
    """What a report needs of one file; `metrics` are patterns of those to draw, and after the end timings alone."""

    def __init__(self, path: Path, directory: Directory, budget: Budget, metrics: Sequence[str] = ("*",)) -> None:
        super().__init__(path, directory, columns=MetricColumns((*metrics, f"{TIMES}*", DEGRADED)))
        self._matches = re.compile("|".join(map(translate, metrics))).match
        wants = self.columns.wants

        def is_needed(name: str) -> bool:
            base = _OF_RANKS.sub("", name)  # what the heat map of a metric of ranks is drawn from, too
            return bool(wants(name) or self._matches(f"{base}{_ARGMAX}") or self._matches(f"{base}{_STRAGGLER}"))

        self.columns.wants = is_needed
        self.columns.also |= {*MAIN_AXES, TIME}
        self.left_out: int = 0  # number of names that match but have no curve
        self.media: dict[str, deque[Logged]] = {}  # the last ones of each name, with their positions at the end
        self.media_left_out: int = 0  # number of values that are not kept because there are too many names
        self.last: float = math.nan  # position of the last row
        self.curves: dict[str, Curve] = {}
        self.blames: list[Blame] = []
        self.system: dict[tuple[str, str], Curve] = {}  # by name and part (``"gpu 0"``; empty for the whole)
        self.sampled_from: float = math.nan  # seconds since the epoch of the first sample of system metrics
        self.console: ConsoleTail = ConsoleTail()
        self.facts: dict[str, str] = {}  # what is known of the run beside its config
        self._environment: dict[str, Any] = {}
        self._budget = budget
        self._definitions = Definitions()  # of the x axes
        self._samples: dict[tuple[str, str], tuple[array[float], array[float]]] = {}  # their minutes and values

    def add(self, record: Record) -> None:
        kind, contents = record
        if kind == "metric":
            self._define(contents)
        elif kind == "stats":
            self._add_sample(contents)
        elif kind == "output_raw":
            self.console.add(contents.get("line") or "")
        elif kind == "environment":
            self._environment |= contents
        super().add(record)

    def add_media(self, media: Mapping[str, dict[str, Any]]) -> None:
        for name, value in media.items():
            if value.get("_type") not in KINDS_OF_MEDIA:
                continue
            if name[:_LONGEST_NAME] in self.media or len(self.media) < MOST_MEDIA:
                self.media.setdefault(name[:_LONGEST_NAME], deque(maxlen=STEPS)).append((self.rows, value))
            else:
                self.media_left_out += 1

    def _define(self, record: Mapping[str, Any]) -> None:
        axis, name = record.get("step_metric"), record.get("name") or record.get("glob_name")
        if axis and name and len(self._definitions.given) < MOST_NAMES:
            self._definitions = self._definitions.followed_by(name, {"step_metric": axis})
            self.columns.also.add(axis)

    def end(self, *, secrets: bool = False) -> None:
        # Without `secrets`, config and facts have none: the page may be handed on.
        self.console.end()
        self._draw(dict(self.columns))
        for name in [name for name in self.columns if not name.startswith(TIMES)]:
            del self.columns[name]
        self.system = {
            key: Curve(self._budget, "minutes", *map(np.array, columns)) for key, columns in self._samples.items()
        }
        super().end()
        self.columns.clear()
        self.config = self.config if secrets else redacted(self.config)
        known = {**self.record, **self._environment}
        count, program = known.get("gpu_count"), known.get("code_path_local") or known.get("program")
        command = [program, *known.get("args", ())] if program else []
        found = {
            "tags": ", ".join(self.tags),
            "job type": self.job_type,
            "notes": known.get("notes"),
            "host": known.get("host"),
            "GPUs": f"{count} x {known.get('gpu_type') or 'unknown'}" if count else None,
            "command": shlex.join(command if secrets else _without_secrets(command)),
            "Python": known.get("python"),
            "git commit": known.get("git", {}).get("commit"),
        }
        self.facts = {
            name: cell_text(fact if secrets or name == "command" else redacted(fact))
            for name, fact in found.items()
            if fact
        }

    def _draw(self, columns: Mapping[str, tuple[array[int], array[float]]]) -> None:
        # All of this takes time and memory in proportion to the number of values, not to rows times names.
        @cache
        def column(name: str) -> tuple[Numbers, Numbers]:  # the finite values, after one of a row before all others
            rows, values = map(np.array, columns.get(name, (array("I"), array("d"))))
            is_finite = np.isfinite(values)
            return np.append(-1, rows[is_finite]), np.append(math.nan, values[is_finite])

        def values_in(name: str, at: Numbers) -> Numbers:  # NaN in rows that have none
            rows, values = column(name)
            place = np.searchsorted(rows, at, "right") - 1
            return np.where(rows[place] == at, values[place], math.nan)

        def positions(axis: str, at: Numbers) -> Numbers:  # the last ones until some rows; NaN before the first
            rows, values = column(axis)
            found = values[np.searchsorted(rows, at, "right") - 1]
            return np.where(np.isnan(found), at, found) if axis == "_step" else found

        x = all_rows = np.arange(self.rows, dtype=float)
        for axis in reversed(MAIN_AXES):
            own = values_in(axis, all_rows)
            x = np.where(np.isnan(own), x, own)
        self.last = float(x[-1]) if self.rows else math.nan
        self.degraded = _degraded(values_in(DEGRADED, all_rows), x)
        self.media = {
            name: deque((float(x[int(row)]), value) for row, value in kept) for name, kept in self.media.items()
        }
        axes = {TIME, *self._definitions.axes}
        wanted = [name for name in columns if name in axes or (name[:1] != "_" and self._matches(name))]
        drawn = [name for name in wanted if len(name) <= _LONGEST_NAME][:MOST_NAMES]
        self.left_out = len(wanted) - len(drawn) + self.columns.has_more
        for name in drawn:
            rows, values = map(np.array, columns[name])
            axis = "_step" if name in axes else self._definitions.of(name).get("step_metric", "_step")
            if math.isnan(positions(axis, rows)[0]):
                axis = "_step"
            if axis != name:
                self.curves[name] = Curve(self._budget, axis, positions(axis, rows), values)
        blames: dict[str, Blame] = {}
        for name, curve in self.curves.items():
            if name.endswith(_ARGMAX):
                base, ranks, at = name.removesuffix(_ARGMAX), name, column(name)[0][1:]
                means = values_in(base, at)
                excess = values_in(f"{base}/max", at) - means
            elif name == BUSY or name.endswith(_STRAGGLER):
                base = ranks = RANK if name == BUSY else name  # only rows in which one rank delays the others have it
                at = np.union1d(column(ranks)[0][1:], column(BUSY)[0][1:])
                start = base.removesuffix(_STRAGGLER)
                means, excess = values_in(f"{start}/step", at), values_in(f"{start}/straggler_excess", at)
            else:
                continue
            if base not in blames and len(blames) < _MOST_BLAMES:
                x = positions(curve.axis, at)
                blames[base] = Blame(base, curve.axis, x, values_in(ranks, at), excess, means)
        self.blames = list(blames.values())

    def _add_sample(self, stats: dict[str, Any]) -> None:
        seconds = seconds_of(stats.get("timestamp"))
        if seconds is None:
            return
        if math.isnan(self.sampled_from):
            self.sampled_from = seconds
        numbers, _ = numbers_and_media(stats.get("item", {}))
        for name, value in numbers.items():
            key = _part(name[:_LONGEST_NAME])
            if key in self._samples or len(self._samples) < _MOST_SYSTEM:
                minutes, values = self._samples.setdefault(key, (array("d"), array("d")))
                minutes.append((seconds - self.sampled_from) / 60)
                values.append(value)


@lru_cache(10 * _MOST_SYSTEM)
def _part(name: str) -> tuple[str, str]:
    """Return the name of a system metric without its numbered part (such as a GPU), and that part."""
    plain = _LABEL.sub("", name).removeprefix("system.")
    numbered = _NUMBERED.match(plain)
    return (f"{numbered[1]}{numbered[3]}", f"{numbered[1]} {numbered[2]}") if numbered else (plain, "")


def seconds_of(time: str | None) -> float | None:  # since the epoch
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() if time else None


def _without_secrets(command: Sequence[str]) -> list[str]:
    shown, option = [], ""
    for argument in command:
        name, equals, value = argument.partition("=")
        if equals and is_secret(name, _number_in(value)):
            shown.append(f"{name}={HIDDEN}")
        else:
            is_hidden = option and not argument.startswith("--") and is_secret(option, _number_in(argument))
            shown.append(HIDDEN if is_hidden else without_passwords(str(redacted(argument))))
        option = argument if argument.startswith("-") and not equals else ""
    return shown


def _number_in(text: str) -> float | str:
    """Return the number that an argument is, which the name of an option such as ``--max-tokens`` makes no secret."""
    try:
        return float(text)
    except ValueError:
        return text
