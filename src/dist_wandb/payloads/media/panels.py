"""Tables and images of all ranks, each as one panel: copying, encoding and decoding of rows and images, and merging.

Columns of tables are matched by name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from itertools import chain, islice
from typing import Any, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.payloads.framing import excerpt, framed
from dist_wandb.payloads.media.cells import (
    BESIDE,
    OF_PIXELS,
    PLAIN,
    Columns,
    Copies,
    MakeImage,
    Part,
    Picture,
    check_pillow,
    copied_cell,
    copied_picture,
    json_of,
    named_arguments,
    natural,
    plain_cell,
    png_of,
)

_RANK, _RANK_OTHERWISE = "rank", "global_rank"  # the added column, and its name if users have a column "rank"
_LISTS = frozenset({list, tuple})
_DEFAULT_COLUMNS = ("Input", "Output", "Expected")  # W&B's own default


class MergedTable(NamedTuple):
    """The table of some ranks. It is converted to W&B's when its row is written."""

    columns: Columns
    rows: list[list[Any]]  # rows of JSON values, dates and `Picture`s


def copied_table(
    columns: Sequence[str | int] | None, data: Any, most: int, copies: Copies
) -> tuple[Columns, list[Any], int]:
    """Return column names, copies of the first rows, and the number of all, of a `wandb.Table`, data frame or rows."""
    names, rows, total = _columns_and_rows(columns, data, most)
    if not (_LISTS.issuperset(map(type, rows)) and {len(names)}.issuperset(map(len, rows))):
        for number, row in enumerate(rows):
            if isinstance(row, (str, Mapping)) or not hasattr(row, "__len__") or len(row) != len(names):
                what = f"has {len(row)} cells" if isinstance(row, (list, tuple)) else f"is {type(row).__name__}"
                raise ConfigurationError(
                    f"Row {number} of the table {what}, but its columns are {names}. Pass rows of that length."
                )
    if PLAIN.issuperset(map(type, chain.from_iterable(rows))):  # the fast path of most tables: one pass over all cells
        return names, [list(row) for row in rows], total
    kept = [
        list(row) if PLAIN.issuperset(map(type, row)) else [copied_cell(cell, copies) for cell in row] for row in rows
    ]
    return names, kept, total


def _columns_and_rows(columns: Sequence[str | int] | None, data: Any, most: int) -> tuple[Columns, Sequence[Any], int]:
    if is_table(data):
        return list(data.columns), data.data[:most], len(data.data)
    if is_frame(data):
        return list(data.columns), list(islice(data.itertuples(index=False, name=None), most)), len(data)
    names = list(_DEFAULT_COLUMNS if columns is None else columns)
    if any(type(name) not in (str, int) for name in names):
        raise ConfigurationError(
            f"columns={names!r} has names that are neither text nor integers. Pass e.g. ['label']."
        )
    rows = [] if data is None else data
    if not isinstance(rows, (list, tuple)) and type(rows).__name__ != "ndarray":
        raise ConfigurationError(f"A table was given {type(data).__name__} as its rows, but takes a list of lists.")
    first = rows[:most]
    return names, first if isinstance(first, (list, tuple)) else first.tolist(), len(rows)


def is_table(value: object) -> bool:
    """Return whether a value is a `wandb.Table`, by its attributes, because importing wandb takes long."""
    return isinstance(getattr(value, "columns", None), list) and isinstance(getattr(value, "data", None), list)


def is_frame(value: object) -> bool:
    """Return whether a value is a pandas data frame."""
    return hasattr(value, "columns") and hasattr(value, "itertuples")


def encoded_row(row: Sequence[Any], make_image: MakeImage) -> bytes:
    """Encode a row for `decoded_row`."""
    found = [(index, cell) for index, cell in enumerate(row) if isinstance(cell, Picture)]
    dates = [index for index, cell in enumerate(row) if isinstance(cell, date)]
    cells = [None if isinstance(cell, Picture) else cell for cell in row]
    beside = [(index, picture.beside) for index, picture in found]
    text = json.dumps([cells, beside, dates], default=json_of)
    return framed(text.encode(), *(png_of(picture.value, picture.pixels, make_image) for _, picture in found))


def decoded_row(text: bytes, *pngs: bytes) -> list[Any]:
    """Decode the framed parts of `encoded_row`."""
    cells, beside, dates = json.loads(text)
    if not isinstance(cells, list):
        raise TypeError("a row is not a list of cells")
    for (index, arguments), png in zip(beside, pngs, strict=True):
        cells[natural(index)] = Picture(png, {}, named_arguments(arguments))
    for index in dates:
        moment = datetime.fromisoformat(cells[natural(index)])
        cells[index] = moment if "T" in cells[index] else moment.date()
    return cells


def checked_column(name: Any) -> Any:
    """Check a received name of a column."""
    if type(name) not in PLAIN:
        raise TypeError(f"{excerpt(name)} is not a name of a column")
    return name


def merged_table(parts: Sequence[Part]) -> MergedTable:
    """Merge tables, with columns matched by name."""
    union = list(dict.fromkeys(name for part in _with_rows(parts) for name in _numbered(part.columns)))
    names = [name for name, _ in union]
    columns = [_RANK_OTHERWISE if _RANK in names else _RANK, *names]
    rows: list[list[Any]] = []
    for part in parts:
        own = _numbered(part.columns)
        if own == union:
            rows += ([part.rank, *row] for row in part.items)
        else:
            named = (dict(zip(own, row, strict=True)) for row in part.items)
            rows += ([part.rank, *map(row.get, union)] for row in named)
    return MergedTable(columns, [[plain_cell(cell) for cell in row] for row in rows])


def differ(parts: Sequence[Part]) -> bool:
    """Return whether tables have different columns."""
    return len({tuple(part.columns) for part in _with_rows(parts)}) > 1


def _with_rows(parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts that determine the columns: those with rows, or all if none has rows."""
    return [part for part in parts if part.items] or parts


def _numbered(columns: Iterable[str | int]) -> list[tuple[str | int, int]]:
    """Number the columns, to distinguish those of the same name."""
    seen: Counter[str | int] = Counter()
    numbered = []
    for name in columns:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


class MergedImages(NamedTuple):
    """The images of some ranks. They are converted to W&B's when their row is written."""

    pictures: list[Picture]


def copied_images(
    images: Any, per_image: Mapping[str, Sequence[Any]], most: int, copies: Copies
) -> tuple[list[Picture], int]:
    """Return copies of the first images, and the number of all; for the arguments and errors see `gathered`."""
    if not isinstance(images, (list, tuple)):
        raise ConfigurationError(
            f"gathered was given {type(images).__name__}, but takes a wandb.Table, a data frame, a list of rows "
            "together with columns=[...], or a list of images."
        )
    for name, values in per_image.items():
        if name not in OF_PIXELS + BESIDE:
            known = suggest(name, OF_PIXELS + BESIDE)
            raise ConfigurationError(f"{name!r} is not an argument that can be gathered with images. {known}")
        if len(values) != len(images):
            raise ConfigurationError(f"{name} has {len(values)} items for {len(images)} images. Pass one for each.")
    if images:
        check_pillow()
    kept = []
    for number, image in enumerate(images[:most]):
        own = {name: values[number] for name, values in per_image.items() if values[number] is not None}
        kept.append(copied_picture(image, own, copies))
    return kept, len(images)


def encoded_image(picture: Picture, make_image: MakeImage) -> bytes:
    """Encode an image for `decoded_image`."""
    beside = json.dumps(picture.beside, default=json_of).encode()
    return framed(beside, png_of(picture.value, picture.pixels, make_image))


def decoded_image(text: bytes, png: bytes) -> Picture:
    """Decode the framed parts of `encoded_image`."""
    return Picture(png, {}, named_arguments(json.loads(text)))


def merged_images(parts: Sequence[Part]) -> MergedImages | None:
    """Return all images, with captions that begin with the rank; `None` if there are none."""
    pictures = []
    for rank, picture in ((part.rank, picture) for part in parts for picture in part.items):
        caption = picture.beside.get("caption")
        caption = f"rank {rank}" if caption is None else f"rank {rank}: {caption}"
        pictures.append(picture._replace(beside={**picture.beside, "caption": caption}))
    return MergedImages(pictures) if pictures else None
