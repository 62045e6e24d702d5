"""W&B's tables and images."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

_TOLD_BY_TYPE = frozenset({int, float, str, bool, type(None), None})  # `None` for NaN, which is a type to wandb


def images(values: Iterable[Any]) -> list[Any]:
    """Arrays or PIL images as W&B's."""
    import wandb

    return [wandb.Image(value) for value in values]


def image(value: Any, files: Path | None = None, **arguments: Any) -> Any:
    """A W&B image.

    Args:
        value: What `wandb.Image` takes, or the bytes of a PNG, which are not encoded anew.
        files: Directory for a file of these bytes; it is needed until the image is logged.
        **arguments: Of `wandb.Image`.
    """
    import wandb

    if isinstance(value, bytes) and files is not None:
        path = files / f"{uuid.uuid4().hex}.png"
        path.write_bytes(value)
        value = str(path)
    return wandb.Image(value, **arguments)


def table(columns: list[str | int] | None, data: list[list[Any]] | None, dataframe: Any) -> Any:
    """A W&B table, from `columns` and `data` or from `dataframe`."""
    import wandb

    return wandb.Table(columns=columns, data=data, dataframe=dataframe)


def table_of_any(columns: list[str | int], data: list[list[Any]]) -> Any:
    """A W&B table, also of columns that have cells of different types.

    wandb finds out the types of columns row by row, which takes long. Of numbers, text and the like a few rows tell the
    same as all.
    """
    import wandb

    telling = _telling_rows(data)
    try:
        found = wandb.Table(columns=columns, data=telling)
    except TypeError:
        found = wandb.Table(columns=columns, data=telling, allow_mixed_types=True)
    found.data = data
    return found


def _telling_rows(data: list[list[Any]]) -> list[list[Any]]:
    """Rows that have, in each column, all types of cells; all rows where types are not all there is to tell."""
    seen: set[tuple[Any, ...]] = set()
    telling = []
    for row in data:
        kinds = tuple([None if type(cell) is float and math.isnan(cell) else type(cell) for cell in row])
        if kinds not in seen:
            if not _TOLD_BY_TYPE.issuperset(kinds):
                return data
            seen.add(kinds)
            telling.append(row)
    return telling


def is_media(value: object) -> bool:
    """Whether a value is one of wandb's own objects (an image, a table), or a list with one."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(type(item).__module__.partition(".")[0] == "wandb" for item in values)
