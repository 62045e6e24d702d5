"""Create W&B's tables and images, and take values that the script may change as they are when they are logged.

wandb infers the types of columns row by row, at tens of microseconds each: if the types are certain, it first gets a
few rows that contain every type, and then the others. PNGs are passed to it as files, without encoding them again.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from numbers import Number
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from dist_wandb.payloads.cells import Picture
from dist_wandb.payloads.devices import PLAIN, Later, as_tensor
from dist_wandb.payloads.gathers import Gathered, MergedImages, MergedTable
from dist_wandb.payloads.metrics import is_metric
from dist_wandb.payloads.scalars import DEEPEST
from dist_wandb.settings.config_values import decoded, encoded

_MERGED = frozenset({MergedTable, MergedImages})
_MEDIA = frozenset({"wandb", "matplotlib", "plotly"})  # packages whose objects have no useful repr
_LARGEST_LIST = 32  # numbers of an array that W&B stores as a list, and not as a histogram
_PLAIN_TYPES = frozenset({int, float, str, bool, type(None), None})  # `None` for NaN, which is a type to wandb


def image(value: Any, files: Callable[[], Path] | None = None, **arguments: Any) -> Any:
    """Return a W&B image of a value, or of a PNG's bytes, kept as a file in `files()` until the image is logged."""
    import wandb

    if isinstance(value, bytes) and files is not None:
        path = files() / f"{uuid.uuid4().hex}.png"
        path.write_bytes(value)
        value = str(path)
    return wandb.Image(value, **arguments)


def table_of_any(columns: list[str | int], data: list[list[Any]]) -> Any:
    import wandb

    # wandb infers the types of columns row by row, which is slow. So it gets a row for each combination of plain types.
    typical: dict[tuple[Any, ...], list[Any]] = {}
    for row in data:
        kinds = [None if type(cell) is float and math.isnan(cell) else type(cell) for cell in row]
        typical.setdefault(tuple(kinds), row)
    rows = list(typical.values()) if _PLAIN_TYPES.issuperset(chain(*typical)) else data
    try:
        found = wandb.Table(columns=columns, data=rows)
    except TypeError:
        found = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
    found.data = data
    return found


def is_media(value: object) -> bool:
    """Return whether a value is one of wandb's own objects (an image, a table), a plot, or a list that contains one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(_package(item) in _MEDIA for item in values)


def _package(value: object) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else type(value).__module__  # pyplot itself is a plot
    return name.partition(".")[0]


@dataclass(frozen=True)
class AsLogged:
    """What W&B stores of a value, taken when it was logged."""

    value: Any
    name: str | None = None  # under which it is stored; `None`: that of the value


def may_change(value: object, depth: int = DEEPEST) -> bool:
    """Return whether the script may change a value after `log`, and `payloads.scalars` does not copy it."""
    if type(value) in PLAIN or as_tensor(value) is not None:  # a hot path: the next checks take longer
        return False
    if value is None or isinstance(value, (str, bytes, range, Number, Gathered, AsLogged)) or not depth:
        return False
    if isinstance(value, (list, tuple)):
        is_plain = PLAIN.issuperset(map(type, value)) or any(hasattr(type(item), "__array__") for item in value)
        return not is_plain and any(may_change(item, depth - 1) for item in value)
    if _package(value) == "pandas":  # a data frame becomes a table
        return True
    if hasattr(type(value), "__array__") or is_metric(value):
        return False
    return not isinstance(value, Mapping) or any(may_change(item, depth - 1) for item in value.values())


def shown_values(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a row that a summary shows: numbers, which may be `Later`, text, lists of these, media."""
    if PLAIN.issuperset(map(type, row.values())):
        return row
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if type(value) in PLAIN or type(value) is Later:
            shown[name] = value
        elif type(value) is AsLogged and value.name is None:
            shown[name] = value.value
        elif isinstance(value, (list, tuple)) and PLAIN.issuperset(map(type, value)):
            shown[name] = list(value)
        elif hasattr(type(value), "tolist"):
            with suppress(Exception):  # a sparse or nested tensor has no list
                if math.prod(value.shape) <= _LARGEST_LIST:
                    shown[name] = value.tolist()
    return shown


def as_written(value: Any) -> Any:
    is_large = hasattr(type(value), "shape") and math.prod(value.shape) > _LARGEST_LIST
    return value if is_large or is_media(value) else decoded(encoded(value))  # a list for a tensor, say


def with_taken(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if AsLogged not in map(type, row.values()):
        return row
    return dict([(one.name or name, one.value) if type(one) is AsLogged else (name, one) for name, one in row.items()])


@contextmanager
def made_of_merged(row: Mapping[str, Any], warn: Callable[[str, Exception], None]) -> Iterator[Mapping[str, Any]]:
    """Convert merged tables and images of a row, to be logged inside the context; what fails is left out: `warn`.

    A row without any is yielded itself.
    """
    if _MERGED.isdisjoint(map(type, row.values())):
        yield row
        return
    with ExitStack() as stack:

        @cache
        def files() -> Path:
            directory = TemporaryDirectory(prefix="dist_wandb-", ignore_cleanup_errors=True)
            return Path(stack.enter_context(directory))

        made: dict[str, Any] = {}
        for name, value in row.items():
            try:
                made[name] = _made_of(value, files)
            except Exception as error:  # noqa: BLE001, PERF203  # data sent by a peer must not cost the rest of the row
                warn(name, error)
        yield made


def _made_of(value: Any, files: Callable[[], Path]) -> Any:
    if isinstance(value, Picture):
        return image(value.value, files, **value.pixels, **value.beside)
    if isinstance(value, MergedImages):
        return [_made_of(picture, files) for picture in value.pictures]
    if isinstance(value, MergedTable):
        is_shown = any(isinstance(cell, Picture) for row in value.rows for cell in row)
        rows = [[_made_of(cell, files) for cell in row] for row in value.rows] if is_shown else value.rows
        return table_of_any(value.columns, rows)
    return value
