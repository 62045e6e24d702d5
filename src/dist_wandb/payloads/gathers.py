"""Tables and images of all ranks: the bytes that a rank contributes, and the merged result.

On the training thread, `gathered` copies values that could change, and refuses invalid ones. Cells become JSON values;
other objects become their repr, with a warning; image files are read. Once the device has computed, another thread
encodes each row or image: as JSON, and the PNG that `wandb.Image` would write, so bytes from peers are never unpickled.
An image is encoded as a row of one cell. Later rows of this rank wait until then, in order.

The result is plain: a `MergedTable` or `MergedImages`, ordered by rank, with columns matched by name, and `None` if a
rank lacks a column. This module neither communicates with other ranks nor imports wandb.
"""

from __future__ import annotations

import json
import operator
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime
from itertools import accumulate, chain, islice, takewhile
from typing import Any, Literal, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.payloads.cells import (
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
    named_arguments,
    natural,
    plain_cell,
    png_of,
)
from dist_wandb.payloads.devices import arrived
from dist_wandb.payloads.framing import excerpt, framed, parsing, unframed

Kind = Literal["table", "images"]

MOST: dict[Kind, int] = {"table": 10_000, "images": 108}  # W&B's own limits for a table and for a list of images
_RANK, _RANK_OTHERWISE = "rank", "global_rank"  # the added column, and its name if users have a column "rank"
_LISTS = frozenset({list, tuple})
_DEFAULT_COLUMNS = ("Input", "Output", "Expected")  # W&B's own default


class MergedTable(NamedTuple):
    """The table of some ranks. It is converted to W&B's when its row is written."""

    columns: Columns
    rows: list[list[Any]]  # rows of JSON values, dates and `Picture`s


class MergedImages(NamedTuple):
    """The images of some ranks. They are converted to W&B's when their row is written."""

    pictures: list[Picture]


class Encoded(NamedTuple):
    """The encoded contribution of a rank."""

    items: list[bytes]  # the bytes of each row or image
    size: int  # number of bytes of all items
    columns: Columns  # names of a table's columns; empty for images
    total: int  # number of rows or images that were logged
    limit: int  # maximum number of items of all ranks together, as given on this rank

    def within(self, size: int, number: int | None = None) -> Encoded:
        """Return the first items that have at most `size` bytes together, and at most `number` of them."""
        sums = accumulate(map(len, self.items[:number]))
        items = self.items[: sum(1 for _ in takewhile(size.__ge__, sums))]
        return self._replace(items=items, size=sum(map(len, items)))

    def as_bytes(self, rank: int) -> bytes:
        return framed(json.dumps([rank, self.columns, self.total]).encode(), *self.items)


class Gathered:
    """Rows or images of this rank, to be merged with those of other ranks. Made by `gathered`."""

    def __init__(
        self, kind: Kind, items: list[Any], total: int, limit: int, columns: Columns | None = None, *, copies: Copies
    ) -> None:
        self.kind = kind
        self.limit = limit  # of the items of all ranks together
        self.replaced: list[str] = sorted(copies.replaced)
        self._items = items  # copies of the rows or images within the limit
        self._total = total  # number of those that were given
        self._columns = columns or []  # none for images
        self._under_way = copies.under_way
        self._encoder: threading.Thread | None = None
        self._encoded: Encoded | Exception | None = None
        self._make_image: MakeImage | None = None  # set when it is logged

    def use(self, rank: int, make_image: MakeImage) -> None:
        """Prepare for sending; raise ConfigurationError the second time, because sent items are not kept."""
        if self._make_image is not None:
            raise ConfigurationError(
                f"A gathered table or panel was logged a second time on rank {rank}. Call dist_wandb.gathered(...) "
                "again with the same rows or images."
            )
        self._make_image = make_image

    def is_ready(self) -> bool:
        """Return whether `encoded` does not wait. Starts encoding on another thread, because large images take long."""
        if not self.is_copied():
            return False
        if self._encoder is None:
            self._encoder = threading.Thread(target=self._encode, name="dist_wandb-encode", daemon=True)
            try:
                self._encoder.start()
            except RuntimeError:  # since Python 3.12, no thread starts while the interpreter shuts down
                self._encode()
        return self._encoded is not None

    def is_copied(self) -> bool:
        """Return whether `part` does not wait; always true if the devices have no events."""
        return all(copy.is_ready() for copy in self._under_way)

    def has_arrived(self) -> bool:
        """Return whether that is certain, because nothing of it was on a device."""
        return not self._under_way

    def encoded(self) -> Encoded:
        """Return the encoded contribution of this rank; raise any error of encoding a value."""
        if self._encoded is None:
            self._encode()
        if isinstance(self._encoded, Exception):
            raise self._encoded
        assert self._encoded is not None, "either of the two"  # noqa: S101
        return self._encoded

    def part(self, rank: int) -> Part:
        """Return the contribution without encoding it. Waits for the device."""
        if self._under_way:
            self._items, self._under_way = list(map(arrived, self._items)), []
        return Part(rank, self._columns, self._total, self._items)

    def _encode(self) -> None:
        try:
            assert self._make_image is not None, "it is encoded only after it was logged"  # noqa: S101
            rows = [item if self.kind == "table" else [item] for item in self.part(-1).items]
            items = [encoded_row(row, self._make_image) for row in rows]
            self._encoded = Encoded(items, sum(map(len, items)), self._columns, self._total, self.limit)
        except Exception as error:  # noqa: BLE001  # raised by `encoded`
            self._encoded = error
        self._items = []


def gathered(
    value: Any, columns: Sequence[str | int] | None = None, *, limit: int | None = None, **per_image: Sequence[Any]
) -> Gathered:
    """Gather rows of a table, or images, from all ranks of a unit into one table or panel of its primary.

    Log the result on every rank under the same name, like any value, with or without numbers in the same call. Logging
    never waits for other ranks or for a device, and does not take part in collectives of the training. A rank that logs
    nothing delays the result no longer than with numbers. Tables get a first column ``rank`` (``global_rank`` if they
    have a column of that name). Captions of images begin with the rank. Rows are ordered by rank, then as logged.
    Columns that only some ranks have are filled with `None`.

    Cells may be numbers, text, `None`, bools, dates, lists and mappings of these, arrays and tensors (as lists), PIL
    images and `wandb.Image`. Any other object is replaced by its repr, with a warning. NaN and infinities are kept.

    If nothing is gathered, in a world of one or with ``run_mode="new"`` without `reduce`, each run gets the rows or
    images of its own rank, in the same form.

    Args:
        value: A table: a `wandb.Table`, a pandas data frame, or rows together with `columns`. Or images: a list of
            arrays, tensors (channels first, as in `wandb.Image`), PIL images, paths, figures or `wandb.Image`.
        columns: Names of the columns, if `value` is rows.
        limit: Maximum number of rows or images of all ranks together. Ranks with few leave their share to the others.
            Items beyond the limit, or beyond 64 MiB, are left out, with a warning that has the numbers. `None` for the
            number that W&B shows: 10,000 rows, 108 images.
        **per_image: Arguments of `wandb.Image` for images, as lists with one item per image: `caption`, `grouping`,
            `classes`, `boxes`, `mode`, `file_type`.

    Returns:
        A value for `log` of the session, the logger or the tracker.

    Raises:
        ConfigurationError: A row does not have the length of `columns`, a value is not an image, the number of captions
            is wrong, an argument cannot be gathered (`masks`), the limit is below 1, or pillow is missing for images.

    Example:
        Two ranks::

            rows = [["cat", 0.9]] if rank == 0 else [["dog", 0.8], ["cat", 0.7]]
            run.log({"loss": loss, "predictions": dist_wandb.gathered(rows, ["label", "score"])}, step=1)
            # rank 0 writes one table: [[0, "cat", 0.9], [1, "dog", 0.8], [1, "cat", 0.7]] under rank, label, score

            run.log({"samples": dist_wandb.gathered([image], caption=["cat"])}, step=1)
            # rank 0 writes a panel of two images, "rank 0: cat" and "rank 1: cat"
    """
    if columns is None and not (is_table(value) or is_frame(value)):
        return _gathered_images(value, per_image, limit)
    if per_image:
        raise ConfigurationError(f"gathered was given {', '.join(per_image)} with a table, but these are for images.")
    return gathered_table(columns, value, limit=limit)


def gathered_table(
    columns: Sequence[str | int] | None = None, data: Any = None, dataframe: Any = None, *, limit: int | None = None
) -> Gathered:
    """Gather a table like `gathered`, from the arguments of `wandb.Table`; `data` may also be one, or a data frame."""
    most, copies = _checked_limit(limit, "table"), Copies()
    names, rows, total = _columns_and_rows(columns, data if dataframe is None else dataframe, most)
    if not (_LISTS.issuperset(map(type, rows)) and {len(names)}.issuperset(map(len, rows))):
        for number, row in enumerate(rows):
            if isinstance(row, (str, Mapping)) or not hasattr(row, "__len__") or len(row) != len(names):
                what = f"has {len(row)} cells" if isinstance(row, (list, tuple)) else f"is {type(row).__name__}"
                raise ConfigurationError(
                    f"Row {number} of the table {what}, but its columns are {names}. Pass rows of that length."
                )
    is_plain = PLAIN.issuperset(map(type, chain.from_iterable(rows)))  # as most tables: one pass over all cells
    kept = [
        list(row) if is_plain or PLAIN.issuperset(map(type, row)) else [copied_cell(cell, copies) for cell in row]
        for row in rows
    ]
    return Gathered("table", kept, total, most, names, copies=copies)


def _checked_limit(limit: int | None, kind: Kind) -> int:
    if limit is None:
        return MOST[kind]
    try:
        number = operator.index(limit)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"limit={limit!r} is not a number of rows or images. Pass an integer, or None.")
    return number


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
    return hasattr(value, "columns") and hasattr(value, "itertuples")


def _gathered_images(images: Any, per_image: Mapping[str, Sequence[Any]], limit: int | None) -> Gathered:
    most, copies = _checked_limit(limit, "images"), Copies()
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
    return Gathered("images", kept, len(images), most, copies=copies)


def encoded_row(row: Sequence[Any], make_image: MakeImage) -> bytes:
    found = [(index, cell) for index, cell in enumerate(row) if isinstance(cell, Picture)]
    dates = [index for index, cell in enumerate(row) if isinstance(cell, date)]
    cells = [None if isinstance(cell, Picture) else cell for cell in row]
    beside = [(index, picture.beside) for index, picture in found]
    others = lambda value: value.isoformat() if isinstance(value, date) else plain_cell(value)  # noqa: E731
    text = json.dumps([cells, beside, dates], default=others)
    return framed(text.encode(), *(png_of(picture.value, picture.pixels, make_image) for _, picture in found))


def decoded_row(text: bytes, *pngs: bytes) -> list[Any]:
    cells, beside, dates = json.loads(text)
    if not isinstance(cells, list):
        raise TypeError("a row is not a list of cells")
    for (index, arguments), png in zip(beside, pngs, strict=True):
        cells[natural(index)] = Picture(png, {}, named_arguments(arguments))
    for index in dates:
        moment = datetime.fromisoformat(cells[natural(index)])
        cells[index] = moment if "T" in cells[index] else moment.date()
    return cells


def decoded(kind: Kind, data: bytes) -> Part:
    """Decode the contribution of a rank; raise ConfigurationError if it is malformed."""
    with parsing(data, "a table or images"):
        head, *items = unframed(data)
        rank, columns, total = json.loads(head)
        rows = [decoded_row(*unframed(item)) for item in items]
        if kind == "images":
            cells = list(chain.from_iterable(rows))
            if not all(isinstance(cell, Picture) for cell in cells):
                raise TypeError("an item is not an image")
            return Part(natural(rank), [], natural(total), cells)
        if not isinstance(columns, list) or not PLAIN.issuperset(map(type, columns)):
            raise TypeError(f"{excerpt(columns)} are not names of columns")
        if any(len(row) != len(columns) for row in rows):
            raise ValueError("a row has more or fewer cells than there are columns")
        return Part(natural(rank), columns, natural(total), rows)


def fair(wanted: Sequence[int], limit: int) -> list[int]:
    """Split a limit into shares as equal as possible, none larger than wanted: [1, 10, 10] for [1, 100, 100] and 21."""
    shares, left = [0] * len(wanted), limit
    for turn, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], left // (len(wanted) - turn))
        left -= shares[index]
    return shares


def differ(parts: Sequence[Part]) -> bool:
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


def whole(kind: Kind, parts: Sequence[Part]) -> MergedTable | MergedImages | None:
    """Merge tables, or images, whose captions get the rank, by ascending rank; `None` if there are no images."""
    if kind == "table":
        union = list(dict.fromkeys(name for part in _with_rows(parts) for name in _numbered(part.columns)))
        names = [name for name, _ in union]
        rows: list[list[Any]] = []
        for part in parts:
            own = _numbered(part.columns)
            named = (dict(zip(own, row, strict=True)) for row in part.items)
            rows += ([part.rank, *(plain_cell(row.get(name)) for name in union)] for row in named)
        return MergedTable([_RANK_OTHERWISE if _RANK in names else _RANK, *names], rows)
    pictures = []
    for rank, picture in ((part.rank, picture) for part in parts for picture in part.items):
        caption = picture.beside.get("caption")
        caption = f"rank {rank}" if caption is None else f"rank {rank}: {caption}"
        pictures.append(picture._replace(beside={**picture.beside, "caption": caption}))
    return MergedImages(pictures) if pictures else None
