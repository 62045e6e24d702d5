"""Turn the history rows of one file into curves."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from itertools import islice
from typing import Any, NamedTuple

from dist_wandb.exchange.writing import DEGRADED
from dist_wandb.report.blame import Blame
from dist_wandb.report.media import LoggedMedia
from dist_wandb.report.thinning import Budget, Curve
from dist_wandb.wandb_files.reading import with_floats

MOST_NAMES = 2000
"""Largest number of metrics that the page shows of one file."""

_LONGEST_NAME = 200  # characters
_MOST_SPANS = 50
_MOST_BLAMES = 200
_LARGEST = sys.float_info.max
_MOST_KINDS = 50  # media of one row
_NUMBERS = frozenset({int, float})  # without bool
MAIN_AXES = ("global_step", "trainer/global_step", "_step")
_ARGMAX = "/argmax_rank"
_STRAGGLER = "/straggler_rank"
_BUSY = "time/busy"


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


class Axes:
    """The x axes of the metrics, as a file defines them (``run.define_metric``)."""

    def __init__(self) -> None:
        self._exact: dict[str, str] = {}
        self._patterns: dict[str, str] = {}

    def define(self, record: Mapping[str, Any]) -> None:
        """Add a definition."""
        axis, name, pattern = (record.get(key) for key in ("step_metric", "name", "glob_name"))
        if not isinstance(axis, str) or not axis:
            return
        if isinstance(name, str) and name:
            self._exact[name] = axis
        elif isinstance(pattern, str) and len(self._patterns) < MOST_NAMES:
            self._patterns[pattern.removesuffix("*")] = axis

    def of(self, name: str) -> str:
        """Return the name of a metric's x axis."""
        if name in self._exact:
            return self._exact[name]
        matching = [start for start in self._patterns if name.startswith(start)]
        return self._patterns[max(matching, key=len)] if matching else "_step"


class Series(NamedTuple):
    """A metric's values, and the name of their x axis."""

    axis: str
    curve: Curve


class Rows:
    """Collects the rows of one file; `metrics` are patterns of the metrics to keep."""

    def __init__(self, budget: Budget, metrics: Iterable[str] = ("*",)) -> None:
        self.left_out: set[int] = set()
        """Hashes of the names that match but are not kept."""
        self.axes: Axes = Axes()
        self.curves: dict[str, Series] = {}
        self.blames: dict[str, Blame] = {}
        self.media: LoggedMedia = LoggedMedia()
        self.progress: Progress = Progress()
        self._budget = budget
        self._matches = re.compile("|".join(map(translate, metrics))).match
        self._adders: dict[str, tuple[str, Callable[[float, float], None]] | None] = {}
        self._positions: dict[str, float] = {}  # last value of each x axis

    def add(self, item: Mapping[str, Any]) -> None:
        """Add a row."""
        row = item
        if not _NUMBERS.issuperset(map(type, item.values())):
            row = self._numbers_of(item)
        positions = self._positions
        for axis in positions:
            position = row.get(axis)
            if position is not None and -_LARGEST <= position <= _LARGEST:
                positions[axis] = position
        adders = self._adders
        for name, value in row.items():
            adder = adders[name] if name in adders else self._new(name, row)
            if adder is not None:
                axis, add = adder
                add(positions[axis], value)
        if self.blames:
            self._add_blames(row)
        x = next((row[axis] for axis in MAIN_AXES if axis in row), float(self.progress.rows))
        self.progress.add(x, row.get(DEGRADED))

    def _numbers_of(self, item: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers of a row, and add its media to `self.media`."""
        x = next((item[axis] for axis in MAIN_AXES if _is_position(item.get(axis))), self.progress.rows)
        numbers: dict[str, float] = {}
        media: dict[str, dict[str, Any]] = {}
        for name, value in _flattened(item, media):
            number = with_floats(value)
            if _is_number(number):
                numbers[name] = number
        for name, value in media.items():
            self.media.add(name[:_LONGEST_NAME], float(x), value)
        return numbers

    def _new(self, name: str, row: Mapping[str, float]) -> tuple[str, Callable[[float, float], None]] | None:
        """Start the curve of a new name. Return its axis and the function that adds a point, or `None` to skip it."""
        is_wanted = name[:1] != "_" and self._matches(name[:_LONGEST_NAME]) is not None
        if not is_wanted or len(name) > _LONGEST_NAME or len(self.curves) >= MOST_NAMES:
            if is_wanted and len(self.left_out) < 10 * MOST_NAMES:
                self.left_out.add(hash(name))
            if len(self._adders) < 10 * MOST_NAMES:
                self._adders[name] = None
            return None
        axis = self.axes.of(name)
        if axis not in self._positions:
            axis = axis if _is_position(row.get(axis)) else "_step"
            position = row.get(axis, math.nan)
            self._positions.setdefault(axis, position if _is_position(position) else float(self.progress.rows))
        if axis == name:
            self._adders[name] = None
            return None
        curve = Curve(self._budget)
        self.curves[name] = Series(axis, curve)
        self._adders[name] = (axis, curve.add)
        base = name.removesuffix(_ARGMAX) if name.endswith(_ARGMAX) else None
        if name == _BUSY:  # of timings: only the rows in which one rank delays the others have a straggler
            base = f"time{_STRAGGLER}"
        elif name.endswith(_STRAGGLER):
            base = name
        if base and base not in self.blames and len(self.blames) < _MOST_BLAMES:
            self.blames[base] = Blame(base.removesuffix("_rank"), axis)
        return self._adders[name]

    def _add_blames(self, row: Mapping[str, float]) -> None:
        for base, blame in self.blames.items():
            if base.endswith(_STRAGGLER):
                excess = row.get(f"{base.removesuffix('_rank')}_excess", math.nan)
                step = row.get(f"{base.removesuffix(_STRAGGLER)}/step", math.nan)
                if base in row or _BUSY in row:
                    blame.add(self._positions[blame.axis], row.get(base, math.nan), excess, step)
            elif f"{base}{_ARGMAX}" in row:
                x, mean = self._positions[self.curves[f"{base}{_ARGMAX}"].axis], row.get(base, math.nan)
                blame.add(x, row[f"{base}{_ARGMAX}"], row.get(f"{base}/max", math.nan) - mean, mean)


def _is_number(value: object) -> bool:
    return type(value) is float or type(value) is int


def _is_position(value: object) -> bool:
    """Return whether a value is a number that is finite as a float, and so can be a position on an x axis."""
    return _is_number(value) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def _flattened(
    item: Mapping[str, Any], media: dict[str, dict[str, Any]], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield names and values; as in W&B, names of nested mappings are joined by dots. Media are put into `media`."""
    kinds = list(islice((name.removesuffix("._type") for name in item if name.endswith("._type")), _MOST_KINDS))
    for name, value in item.items():
        owner = next((kind for kind in kinds if name.startswith(f"{kind}.")), None) if kinds else None
        if owner is not None:
            media.setdefault(f"{prefix}{owner}", {})[name[len(owner) + 1 :]] = value
        elif isinstance(value, dict):
            if isinstance(value.get("_type"), str):
                media[f"{prefix}{name}"] = value
            elif depth < 8:  # noqa: PLR2004
                yield from _flattened(value, media, f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value
