"""Create W&B's tables and images.

wandb infers the types of columns row by row, at tens of microseconds each: if the types are certain, it first gets a
few rows that contain every type, and then the others. PNGs are passed to it as files, without encoding them again.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dist_wandb.payloads.media.cells import Picture
from dist_wandb.payloads.media.images import MergedImages
from dist_wandb.payloads.media.tables import MergedTable

_MERGED = frozenset({MergedTable, MergedImages})
_PLAIN_TYPES = frozenset({int, float, str, bool, type(None), None})  # `None` for NaN, which is a type to wandb


def images(values: Iterable[Any]) -> list[Any]:
    """Return arrays or PIL images as W&B images."""
    return [image(value) for value in values]


def image(value: Any, files: Path | None = None, **arguments: Any) -> Any:
    """Return a W&B image.

    Args:
        value: A value for `wandb.Image`, or the bytes of a PNG, which are not encoded again.
        files: Directory for a file with these bytes; it must exist until the image is logged.
        **arguments: Further arguments of `wandb.Image`.
    """
    import wandb

    if isinstance(value, bytes) and files is not None:
        path = files / f"{uuid.uuid4().hex}.png"
        path.write_bytes(value)
        value = str(path)
    return wandb.Image(value, **arguments)


def table(columns: list[str | int] | None, data: list[list[Any]] | None, dataframe: Any) -> Any:
    """Return a W&B table, from `columns` and `data` or from `dataframe`."""
    import wandb

    return wandb.Table(columns=columns, data=data, dataframe=dataframe)


def table_of_any(columns: list[str | int], data: list[list[Any]]) -> Any:
    """Return a W&B table, also if cells of one column have different types.

    wandb infers the types of columns row by row, which is slow. For plain types such as numbers and text, it gets a few
    rows with the same types as all rows.
    """
    import wandb

    typical = _typical_rows(data)
    try:
        found = wandb.Table(columns=columns, data=typical)
    except TypeError:
        found = wandb.Table(columns=columns, data=typical, allow_mixed_types=True)
    found.data = data
    return found


def _typical_rows(data: list[list[Any]]) -> list[list[Any]]:
    """Return rows with all cell types of each column; all rows if the type of any cell is not plain."""
    seen: set[tuple[Any, ...]] = set()
    typical = []
    for row in data:
        kinds = tuple([None if type(cell) is float and math.isnan(cell) else type(cell) for cell in row])
        if kinds not in seen:
            if not _PLAIN_TYPES.issuperset(kinds):
                return data
            seen.add(kinds)
            typical.append(row)
    return typical


def is_media(value: object) -> bool:
    """Return whether a value is one of wandb's own objects (an image, a table), or a list that contains one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(type(item).__module__.partition(".")[0] == "wandb" for item in values)


def has_merged(row: Mapping[str, Any]) -> bool:
    """Return whether a row has merged tables or images of all ranks, not yet converted to W&B's objects."""
    return not _MERGED.isdisjoint(map(type, row.values()))


@contextmanager
def made_of_merged(row: Mapping[str, Any], warn: Callable[[str, Exception], None]) -> Iterator[dict[str, Any]]:
    """Convert the merged tables and images of a row to W&B's objects. The row must be logged inside the context.

    Args:
        row: Values by name.
        warn: Called for values that cannot be converted, which are then left out.
    """
    with TemporaryDirectory(prefix="dist_wandb-", ignore_cleanup_errors=True) as directory:
        made: dict[str, Any] = {}
        for name, value in row.items():
            try:
                made[name] = _made_of(value, Path(directory))
            except Exception as error:  # noqa: BLE001, PERF203  # data sent by a peer must not cost the rest of the row
                warn(name, error)
        yield made


def _made_of(value: Any, files: Path) -> Any:
    if isinstance(value, Picture):
        return image(value.value, files, **value.pixels, **value.beside)
    if isinstance(value, MergedImages):
        return [_made_of(picture, files) for picture in value.pictures]
    if isinstance(value, MergedTable):
        is_shown = any(isinstance(cell, Picture) for row in value.rows for cell in row)
        rows = [[_made_of(cell, files) for cell in row] for row in value.rows] if is_shown else value.rows
        return table_of_any(value.columns, rows)
    return value
