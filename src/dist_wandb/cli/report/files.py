"""Read one ``.wandb`` file for a report, and turn its history rows into curves."""

from __future__ import annotations

import math
import re
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

from dist_wandb.cli.report.media import LoggedMedia, cell_text
from dist_wandb.cli.report.page import plain
from dist_wandb.cli.report.thinning import Blame, Budget, Curve
from dist_wandb.settings.config_values import HIDDEN, is_secret, redacted, without_passwords
from dist_wandb.settings.reduction import BUSY, DEGRADED, TIMES, Definitions
from dist_wandb.wandb_files.reading import Contents, StoredRun, numbers_and_media
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

_MOST_LINES = 1000  # of the console
_LONGEST_LINE = 500  # characters
_LONGEST_PENDING = 64 * 1024
_MOST_SYSTEM = 500  # metrics of one file
_LABEL = re.compile(r"/l:.*$", re.DOTALL)  # W&B adds it to the names of a shared writer's system metrics
_NUMBERED = re.compile(r"^(.*?)\.(\d{1,4})(?=\.|$)(.*)$", re.DOTALL)


class Progress:
    """The number of rows, their last position, and the rows to which some ranks did not contribute."""

    def __init__(self) -> None:
        self.rows: int = 0
        self.last: float = math.nan
        self.degraded: int = 0
        self.most: int = 0
        self.spans: list[tuple[float, float]] = []
        self._is_open = False

    def add(self, x: float, missing: float | None) -> None:
        """Add a row at a position, with the number of ranks that did not contribute to it."""
        self.rows += 1
        self.last = x
        if missing is None or not missing > 0:
            self._is_open = False
            return
        self.degraded += 1
        self.most = max(self.most, int(min(missing, 1e9)))
        if self._is_open or len(self.spans) == _MOST_SPANS:
            first, last = self.spans[-1]
            self.spans[-1] = (min(first, x), max(last, x))
        else:
            self.spans.append((x, x))
            self._is_open = True


class Rows:
    """Collects the rows of one file; `metrics` are patterns of the metrics to keep."""

    def __init__(self, budget: Budget, metrics: Iterable[str] = ("*",)) -> None:
        self.left_out: int = 0  # number of names that match but have no curve
        self.curves: dict[str, Curve] = {}
        self.blames: dict[str, Blame] = {}
        self.media: LoggedMedia = LoggedMedia()
        self.progress: Progress = Progress()
        self._definitions = Definitions()  # of the x axes
        self._budget = budget
        self._matches = re.compile("|".join(map(translate, metrics))).match
        self._skipped: set[str] = set()  # names that have no curve
        self._positions: dict[str, float] = {}  # last value of each x axis

    def define(self, record: Mapping[str, Any]) -> None:
        """Take over the x axis of a metric or a pattern, as a file defines it (``run.define_metric``)."""
        axis, name = record.get("step_metric"), record.get("name") or record.get("glob_name")
        if axis and name and len(self._definitions.given) < MOST_NAMES:
            self._definitions = self._definitions.followed_by(name, {"step_metric": axis})

    def add(self, item: Mapping[str, Any]) -> None:
        row, media = numbers_and_media(item)
        rows = float(self.progress.rows)
        x = next((row[axis] for axis in MAIN_AXES if math.isfinite(row.get(axis, math.nan))), rows)
        for name, described in media.items():
            self.media.add(name[:_LONGEST_NAME], float(x), described)
        positions = self._positions
        for axis in positions:
            if math.isfinite(position := row.get(axis, math.nan)):
                positions[axis] = position
        curves, skipped = self.curves, self._skipped
        for name, value in row.items():
            curve = curves.get(name)
            if curve is None and name not in skipped:
                curve = self._new(name, row)
            if curve is not None:
                curve.add(positions[curve.axis], value)
        if self.blames:
            self._add_blames(row)
        self.progress.add(x, row.get(DEGRADED))

    def _new(self, name: str, row: Mapping[str, float]) -> Curve | None:
        """Start the curve of a new name; return `None` to skip it."""
        is_axis = name == TIME or name in self._definitions.axes
        is_wanted = is_axis or (name[:1] != "_" and self._matches(name[:_LONGEST_NAME]) is not None)
        if not is_wanted or len(name) > _LONGEST_NAME or len(self.curves) >= MOST_NAMES:
            if len(self._skipped) < 10 * MOST_NAMES:
                self._skipped.add(name)
                self.left_out += is_wanted
            return None
        axis = "_step" if is_axis else self._definitions.of(name).get("step_metric", "_step")
        if axis not in self._positions:
            axis = axis if math.isfinite(row.get(axis, math.nan)) else "_step"
            position = row.get(axis, math.nan)
            self._positions.setdefault(axis, position if math.isfinite(position) else float(self.progress.rows))
        if axis == name:
            self._skipped.add(name)
            return None
        curve = self.curves[name] = Curve(self._budget, axis)
        base = name.removesuffix(_ARGMAX) if name.endswith(_ARGMAX) else None
        if name == BUSY:  # of timings: only the rows in which one rank delays the others have a straggler
            base = RANK
        elif name.endswith(_STRAGGLER):
            base = name
        if base and base not in self.blames and len(self.blames) < _MOST_BLAMES:
            self.blames[base] = Blame(base, axis)
        return curve

    def _add_blames(self, row: Mapping[str, float]) -> None:
        for base, blame in self.blames.items():
            if base.endswith(_STRAGGLER):
                excess = row.get(f"{base.removesuffix('_rank')}_excess", math.nan)
                step = row.get(f"{base.removesuffix(_STRAGGLER)}/step", math.nan)
                if base in row or BUSY in row:
                    blame.add(self._positions[blame.axis], row.get(base, math.nan), excess, step)
            elif f"{base}{_ARGMAX}" in row:
                x, mean = self._positions[self.curves[f"{base}{_ARGMAX}"].axis], row.get(base, math.nan)
                blame.add(x, row[f"{base}{_ARGMAX}"], row.get(f"{base}/max", math.nan) - mean, mean)


class ConsoleTail:
    """Assembles pieces of console output into lines, as a terminal without colors would show them."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_MOST_LINES)
        self.count: int = 0  # number of all lines, including those that were dropped
        self._pending = ""

    def add(self, text: str) -> None:
        """Add a piece, which may start and end in the middle of a line."""
        *ended, self._pending = (self._pending + text).split("\n")
        if len(self._pending) > _LONGEST_PENDING:
            ended.append(self._pending)
            self._pending = ""
        self.count += len(ended)
        self.lines.extend(plain(line.rstrip("\r").rpartition("\r")[2])[:_LONGEST_LINE] for line in ended)

    def end(self) -> None:
        """Add an incomplete last line."""
        if self._pending:
            self.add("\n")


class FileForReport:
    """What a report needs of one file, collected from its records; `metrics` are patterns of the metrics to keep."""

    stored: StoredRun  # the run that the file describes, once it is read; its `metrics` are timings

    def __init__(self, budget: Budget, metrics: Iterable[str] = ("*",)) -> None:
        self.rows: Rows = Rows(budget, metrics)
        self.system: dict[tuple[str, str], Curve] = {}  # by name and part (``"gpu 0"``; empty for the whole)
        self.console: ConsoleTail = ConsoleTail()
        self.facts: dict[str, str] = {}  # what is known of the run beside its config
        self._contents = Contents()
        self._environment: dict[str, Any] = {}
        self._budget = budget
        self.sampled_from: float = math.nan  # seconds since the epoch of the first sample of system metrics

    def add(self, record: Record) -> None:
        kind, contents = record
        if kind == "history":
            self.rows.add(contents)
            record = kind, {name: value for name, value in contents.items() if name.startswith(TIMES)}
        elif kind == "metric":
            self.rows.define(contents)
        elif kind == "stats":
            self._add_sample(contents)
        elif kind == "output_raw":
            self.console.add(contents.get("line") or "")
        elif kind == "environment":
            self._environment |= contents
        self._contents.add(record)

    def end(self, path: Path, problems: list[str], directory: Directory, *, secrets: bool = False) -> None:
        """Finish after the last record; raise `ReadError` without data of a run. `problems` are damaged parts.

        Without `secrets`, config and facts have none: the page may be handed on.
        """
        self.console.end()
        run = self._contents.as_run(path, problems, directory)
        self.stored = run if secrets else replace(run, config=redacted(run.config))
        known = {**self._contents.run, **self._environment}
        count, program = known.get("gpu_count"), known.get("code_path_local") or known.get("program")
        command = [program, *known.get("args", ())] if program else []
        found = {
            "tags": ", ".join(run.tags),
            "job type": run.job_type,
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

    def _add_sample(self, stats: dict[str, Any]) -> None:
        """Add a sample of system metrics, at the minutes since the first sample."""
        seconds = seconds_of(stats.get("timestamp"))
        if seconds is None:
            return
        if math.isnan(self.sampled_from):
            self.sampled_from = seconds
        numbers, _ = numbers_and_media(stats.get("item", {}))
        for name, value in numbers.items():
            key = _part(name[:_LONGEST_NAME])
            curve = self.system.get(key)
            if curve is None:
                if len(self.system) == _MOST_SYSTEM:
                    continue
                curve = self.system[key] = Curve(self._budget, "minutes")
            curve.add((seconds - self.sampled_from) / 60, value)


@lru_cache(10 * _MOST_SYSTEM)
def _part(name: str) -> tuple[str, str]:
    """Return the name of a system metric without its numbered part (such as a GPU), and that part."""
    plain = _LABEL.sub("", name).removeprefix("system.")
    numbered = _NUMBERED.match(plain)
    return (f"{numbered[1]}{numbered[3]}", f"{numbered[1]} {numbered[2]}") if numbered else (plain, "")


def seconds_of(time: str | None) -> float | None:
    """Return the seconds since the epoch of the time of a record; `None` without a time."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp() if time else None


def _without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command without the values of options that name secrets, and as `redacted` does."""
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
