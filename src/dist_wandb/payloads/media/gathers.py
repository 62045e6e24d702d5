"""Tables and images of all ranks as one: what a rank gives, as bytes, and what the bytes of all ranks come to.

On the training thread `gathered` copies what could change. Later it becomes bytes, an item for each row or image: JSON
and PNG, so nothing of a peer's is unpickled. Nothing here talks to other ranks.
"""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from itertools import accumulate, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.payloads.media import pictures
from dist_wandb.payloads.values import as_tensor, event_after
from dist_wandb.runs import wandb_media
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["table", "images"]
Columns = list[str | int]
Files = Callable[[], Path]

MOST: dict[Kind, int] = {"table": 10_000, "images": 108}  # as many as W&B keeps of a table, and of a list of images
_RANK, _RANK_OTHERWISE = "rank", "global_rank"  # the column, and its name where users have one of that name
_DEFAULT_COLUMNS = ("Input", "Output", "Expected")  # W&B's own, where none are given
_PLAIN = frozenset({int, float, str, bool, type(None)})
_PLAIN_ARRAYS = "biufU"  # kinds of numpy arrays whose lists are plain
_OF_PIXELS = ("mode", "file_type")  # arguments of wandb.Image that decide about the pixels
_BESIDE = ("caption", "grouping", "classes", "boxes")  # and those that go along as JSON
_LENGTH = 8  # bytes of a length
_SHOWN = 100  # characters of what was sent, in messages


class Picture(NamedTuple):
    """An image as it was logged, or as it came from another rank.

    Args:
        value: What `wandb.Image` takes; from another rank the bytes of a PNG.
        pixels: Arguments of `wandb.Image` that decide about its pixels.
        beside: Its other arguments, such as the caption.
    """

    value: Any
    pixels: Mapping[str, Any]
    beside: Mapping[str, Any]


class Encoded(NamedTuple):
    """What a rank can send.

    Args:
        items: One for each row or image.
        size: How many bytes they have.
        columns: Names of a table's columns; of images none.
        total: How many rows or images there were.
        limit: How many all ranks may give together, by this rank.
    """

    items: list[bytes]
    size: int
    columns: Columns
    total: int
    limit: int

    def within(self, size: int, number: int | None = None) -> Encoded:
        """The first items, as many as have so many bytes together, and at most so many as `number`."""
        sums = accumulate(map(len, self.items[:number]))
        items = self.items[: sum(1 for _ in takewhile(size.__ge__, sums))]
        return self._replace(items=items, size=sum(map(len, items)))

    def as_bytes(self, rank: int) -> bytes:
        """All of it, as it is told to the others by this rank."""
        return framed(json.dumps([rank, self.columns, self.total]).encode(), *self.items)


class Part(NamedTuple):
    """What one rank gives to the whole.

    Args:
        rank: Its index in the job.
        columns: Names of a table's columns; of images none.
        total: How many rows or images it had.
        items: Those within the limit.
    """

    rank: int
    columns: Columns
    total: int
    items: list[Any]


class Gathered:
    """Rows or images of this rank, to be brought together with those of the other ranks. Made by `gathered`.

    Args:
        kind: Which of the two.
        items: Rows, or images, safe from later changes; those within the limit.
        total: How many there were.
        limit: How many all ranks may give together.
        columns: Names of a table's columns; of images none.
        taken: What was met while they were copied.
    """

    def __init__(
        self, kind: Kind, items: list[Any], total: int, limit: int, columns: Columns | None = None, *, taken: _Taken
    ) -> None:
        self.kind = kind
        self.limit = limit
        self.replaced = sorted(taken.replaced)
        self._items = items
        self._total = total
        self._columns = columns or []
        self._marks = [event_after(tensor) for tensor in taken.on_devices.values()]
        self._encoder: threading.Thread | None = None
        self._encoded: Encoded | Exception | None = None
        self._is_logged = False

    def use(self, rank: int) -> None:
        """Be logged: once, as what is sent is not kept.

        Raises:
            ConfigurationError: It was logged already.
        """
        if self._is_logged:
            raise ConfigurationError(
                f"A gathered table or panel was logged a second time on rank {rank}. Make another one of the same rows "
                "or images with dist_wandb.gathered(...)."
            )
        self._is_logged = True

    def is_ready(self) -> bool:
        """Whether `encoded` answers without waiting. Large images take long: a thread of their own encodes them."""
        if not all(mark is None or mark.query() for mark in self._marks):
            return False  # of a device without events nothing is known
        if self._encoder is None:
            self._encoder = threading.Thread(target=self._encode, name="dist_wandb-encode", daemon=True)
            self._encoder.start()
        return self._encoded is not None

    def has_arrived(self) -> bool:
        """Whether `part` answers without waiting."""
        return all(mark is not None and mark.query() for mark in self._marks)

    def encoded(self) -> Encoded:
        """What this rank can send.

        Raises:
            Exception: Something could not be encoded.
        """
        if self._encoded is None:
            self._encode()
        if isinstance(self._encoded, Exception):
            raise self._encoded
        assert self._encoded is not None, "either of the two"  # noqa: S101
        return self._encoded

    def part(self, rank: int) -> Part:
        """What this rank gives, where nobody else gives anything. Waits for the device."""
        for mark in self._marks:
            if mark is not None:
                mark.synchronize()
        return Part(rank, self._columns, self._total, self._items)

    def _encode(self) -> None:
        encode = _encoded_row if self.kind == "table" else _encoded_image
        try:
            items = [encode(item) for item in self.part(-1).items]
            self._encoded = Encoded(items, sum(map(len, items)), self._columns, self._total, self.limit)
        except Exception as error:  # noqa: BLE001  # told where it is to be sent
            self._encoded = error
        self._items = []


class _Taken:
    """What is met while things are copied.

    Attributes:
        on_devices: By device, a copy that is on its way to the host.
        replaced: Names of types whose objects were replaced by their repr.
    """

    def __init__(self) -> None:
        self.on_devices: dict[Any, Tensor] = {}
        self.replaced: set[str] = set()

    def tensor(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor on the host, perhaps on its way there."""
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        self.on_devices[tensor.device] = tensor
        return tensor.detach().to("cpu", non_blocking=True)

    def represented(self, value: object) -> str:
        """The repr of what cannot be sent."""
        self.replaced.add(type(value).__name__)
        return repr(value)


# What is logged


def gathered(
    value: Any, columns: Sequence[str | int] | None = None, *, limit: int | None = None, **per_image: Sequence[Any]
) -> Gathered:
    """Bring the rows of a table, or the images, of all ranks of a unit into one table or panel of its primary.

    Log what it returns on every rank under the same name, as any value, with numbers in the same call or without. That
    never waits for other ranks, nor for a device, and takes no part in a collective of the training's. A rank that logs
    none is waited for no longer than with numbers. Tables get a column ``rank`` in front (``global_rank`` if they have
    one of that name), images a caption that begins with the rank. First come the rows of the lowest rank, in their
    order. Columns that only some ranks have are filled with `None`.

    Cells may be numbers, text, `None`, bools, dates, lists and mappings of these, arrays and tensors (as lists), images
    of PIL and `wandb.Image`. Anything else is replaced by its repr, with a warning. NaN and infinities stay.

    Where nothing is brought together, in a world of one or with ``run_mode="new"`` without `reduce`, each run gets the
    rows or images of its own rank, in the same form.

    Args:
        value: A table: a `wandb.Table`, a data frame of pandas, or rows together with `columns`. Or images: a list of
            arrays, tensors (channels first, as in `wandb.Image`), PIL images, paths, figures or `wandb.Image`.
        columns: Names of the columns, if `value` is rows.
        limit: How many rows or images all ranks may give together; ranks with few leave their share to the others.
            What is beyond it, or beyond 64 MiB, is left out, with a warning that has the numbers. `None` for as many as
            W&B shows: 10,000 rows, 108 images.
        **per_image: Of images: arguments of `wandb.Image`, as lists with one item per image: `caption`, `grouping`,
            `classes`, `boxes`, `mode`, `file_type`.

    Returns:
        What `log` of the session, the logger or the tracker takes as a value.

    Raises:
        ConfigurationError: A row of another length than `columns`, something that is no image, a wrong number of
            captions, an argument that cannot be gathered (`masks`), a limit below 1, or images without pillow.

    Example:
        Two ranks::

            rows = [["cat", 0.9]] if rank == 0 else [["dog", 0.8], ["cat", 0.7]]
            run.log({"loss": loss, "predictions": dist_wandb.gathered(rows, ["label", "score"])}, step=1)
            # rank 0 writes one table: [[0, "cat", 0.9], [1, "dog", 0.8], [1, "cat", 0.7]] under rank, label, score

            run.log({"samples": dist_wandb.gathered([image], caption=["cat"])}, step=1)
            # rank 0 writes a panel of two images, "rank 0: cat" and "rank 1: cat"
    """
    if columns is None and not (_is_table(value) or _is_frame(value)):
        return _gathered_images(value, limit, per_image)
    if per_image:
        raise ConfigurationError(f"gathered was given {', '.join(per_image)} with a table, but these are for images.")
    return gathered_table(columns, value, limit=limit)


def gathered_table(
    columns: Sequence[str | int] | None = None, data: Any = None, dataframe: Any = None, *, limit: int | None = None
) -> Gathered:
    """As `gathered`, from the arguments of `wandb.Table`.

    Args:
        columns: Names of the columns.
        data: Rows, an array of two dimensions, a data frame, or a `wandb.Table`.
        dataframe: A data frame of pandas, in place of the two.
        limit: As in `gathered`.

    Raises:
        ConfigurationError: As in `gathered`.
    """
    most, taken = _checked_limit(limit, "table"), _Taken()
    names, rows, total = _columns_and_rows(columns, data if dataframe is None else dataframe, most)
    for place, row in enumerate(rows):
        if isinstance(row, (str, Mapping)) or not hasattr(row, "__len__") or len(row) != len(names):
            what = f"has {len(row)} cells" if isinstance(row, (list, tuple)) else f"is {type(row).__name__}"
            raise ConfigurationError(f"Row {place} of the table {what}, but its columns are {names}. Pass equal lists.")
    kept = [list(row) if _PLAIN.issuperset(map(type, row)) else [_cell(cell, taken) for cell in row] for row in rows]
    return Gathered("table", kept, total, most, names, taken=taken)


def _columns_and_rows(columns: Sequence[str | int] | None, data: Any, most: int) -> tuple[Columns, Sequence[Any], int]:
    """Names of the columns, the first rows, and how many rows there are."""
    if _is_table(data):
        return list(data.columns), data.data[:most], len(data.data)
    if _is_frame(data):
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


def _is_table(value: object) -> bool:
    """Whether a value is a `wandb.Table`, by what it has: importing wandb takes long."""
    return isinstance(getattr(value, "columns", None), list) and isinstance(getattr(value, "data", None), list)


def _is_frame(value: object) -> bool:
    return hasattr(value, "columns") and hasattr(value, "itertuples")


def _checked_limit(limit: int | None, kind: Kind) -> int:
    if limit is None:
        return MOST[kind]
    try:
        number = operator.index(limit)
    except TypeError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"limit={limit!r} is no number of rows or images. Pass an integer, or None.")
    return number


def _gathered_images(images: Any, limit: int | None, per_image: Mapping[str, Sequence[Any]]) -> Gathered:
    if not isinstance(images, (list, tuple)):
        raise ConfigurationError(
            f"gathered was given {type(images).__name__}, but takes a wandb.Table, a data frame, a list of rows "
            "together with columns=[...], or a list of images."
        )
    most, taken = _checked_limit(limit, "images"), _Taken()
    for name, values in per_image.items():
        if name not in _OF_PIXELS + _BESIDE:
            known = suggest(name, _OF_PIXELS + _BESIDE)
            raise ConfigurationError(f"{name!r} does not go to the primary together with an image. {known}")
        if len(values) != len(images):
            raise ConfigurationError(f"{name} has {len(values)} items for {len(images)} images. Pass one for each.")
    if images:
        _check_pillow()
    kept = []
    for place, image in enumerate(images[:most]):
        own = {name: values[place] for name, values in per_image.items() if values[place] is not None}
        kept.append(_picture(image, own, taken))
    return Gathered("images", kept, len(images), most, taken=taken)


def _check_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise ConfigurationError("W&B needs pillow for images, and it is missing. Run: pip install pillow")


def _picture(image: Any, arguments: Mapping[str, Any], taken: _Taken) -> Picture:
    """An image, safe from later changes."""
    beside = {name: _cell(value, taken) for name, value in arguments.items() if name in _BESIDE}
    pixels = {name: value for name, value in arguments.items() if name in _OF_PIXELS}
    tensor = as_tensor(image)
    if tensor is not None:
        return Picture(taken.tensor(tensor), pixels, beside)
    if type(image).__name__ == "ndarray":
        return Picture(image.copy(), pixels, beside)
    if isinstance(image, (str, os.PathLike)):
        return Picture(pictures.opened(Path(image).read_bytes()), pixels, beside)
    if hasattr(image, "savefig"):
        return Picture(pictures.of_figure(image), pixels, beside)
    if not pictures.is_image(image):
        raise ConfigurationError(
            f"gathered was given {type(image).__name__} among images. Pass arrays, tensors, PIL images, paths, figures "
            "or wandb.Image; rows of a table together with columns=[...]."
        )
    caption = pictures.caption(image)
    if pictures.has_overlays(image):
        taken.replaced.add("boxes or masks")
    return Picture(pictures.kept(image), pixels, beside if caption is None else {"caption": caption, **beside})


def _cell(cell: Any, taken: _Taken, *, is_inner: bool = False) -> Any:
    """A cell of a table, safe from later changes: what JSON can hold, dates, tensors on their way, pictures."""
    if type(cell) in _PLAIN:
        return cell
    tensor = as_tensor(cell)
    if tensor is not None and not tensor.is_complex():
        return tensor.item() if tensor.is_cpu and not tensor.dim() else taken.tensor(tensor)
    if isinstance(cell, (list, tuple, Mapping)):
        return _container(cell, taken)
    if isinstance(cell, date):
        moment = _moment(cell)
        return moment.isoformat() if is_inner and moment else moment
    if not is_inner and pictures.is_image(cell):
        _check_pillow()
        return _picture(cell, {}, taken)
    return _other(cell, taken, is_inner=is_inner)


def _container(cell: Any, taken: _Taken) -> Any:
    """A list or a mapping of cells, as far as JSON can hold it."""
    if not isinstance(cell, Mapping):
        return [_cell(item, taken, is_inner=True) for item in cell]
    if not _PLAIN.issuperset(map(type, cell)):
        return taken.represented(cell)
    return {name: _cell(item, taken, is_inner=True) for name, item in cell.items()}


def _other(cell: Any, taken: _Taken, *, is_inner: bool) -> Any:
    """Numbers and text of other kinds than Python's own, and arrays, as far as JSON can hold them; else the repr."""
    for kind in (str, int, float):
        if isinstance(cell, kind):
            return kind(cell)
    if as_tensor(cell) is not None or not (hasattr(cell, "dtype") and hasattr(cell, "tolist")):
        return taken.represented(cell)
    plain = cell.tolist()
    if cell.dtype.kind in _PLAIN_ARRAYS:
        return plain
    return taken.represented(cell) if type(plain) is type(cell) else _cell(plain, taken, is_inner=is_inner)


def _moment(cell: date) -> date | None:
    """A date, or a date with a time, of Python's own kind; `None` for pandas' word that there is none."""
    if cell != cell:  # noqa: PLR0124
        return None
    return datetime.combine(cell.date(), cell.timetz()) if isinstance(cell, datetime) else cell


# As bytes, and back


def framed(*parts: bytes) -> bytes:
    """Bytes that `unframed` takes apart again."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(_LENGTH, "little"), part))


def unframed(data: bytes) -> list[bytes]:
    """What was put together by `framed`.

    Raises:
        ConfigurationError: The bytes are something else.
    """
    parts, position = [], 0
    while position < len(data):
        start = position + _LENGTH
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise ConfigurationError(
                f"The {len(data)} bytes that a rank sent as a table or images are cut off. Install the same version of "
                "dist_wandb on all ranks."
            )
        parts.append(data[start:position])
    return parts


def _encoded_row(row: Sequence[Any]) -> bytes:
    found = [(place, cell) for place, cell in enumerate(row) if isinstance(cell, Picture)]
    dates = [place for place, cell in enumerate(row) if isinstance(cell, date)]
    cells = [None if isinstance(cell, Picture) else cell for cell in row]
    beside = [(place, picture.beside) for place, picture in found]
    text = json.dumps([cells, beside, dates], default=_json_of)
    return framed(text.encode(), *(pictures.png(picture.value, picture.pixels) for _, picture in found))


def _encoded_image(picture: Picture) -> bytes:
    return framed(json.dumps(picture.beside, default=_json_of).encode(), pictures.png(picture.value, picture.pixels))


def _json_of(value: Any) -> Any:
    return value.isoformat() if isinstance(value, date) else _plain(value)


def _plain(cell: Any) -> Any:
    """A cell with lists in place of tensors."""
    if type(cell) in _PLAIN:
        return cell
    if isinstance(cell, list):
        return [_plain(item) for item in cell]
    if isinstance(cell, dict):
        return {name: _plain(item) for name, item in cell.items()}
    tensor = as_tensor(cell)
    return cell if tensor is None else tensor.tolist()


def decoded(kind: Kind, data: bytes) -> Part:
    """What a rank sent.

    Raises:
        ConfigurationError: The bytes are something else.
    """
    try:
        head, *items = unframed(data)
        rank, columns, total = json.loads(head)
        if kind == "images":
            return Part(_natural(rank), [], _natural(total), [_decoded_image(*unframed(item)) for item in items])
        rows = [_decoded_row(*unframed(item)) for item in items]
        if not isinstance(columns, list) or any(len(row) != len(columns) for row in rows):
            raise ValueError("a row has more or fewer cells than there are columns")  # noqa: TRY301  # ends below
        return Part(_natural(rank), [_column(name) for name in columns], _natural(total), rows)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"The {len(data)} bytes that a rank sent as a table or images cannot be read: {error}. Install the same "
            "version of dist_wandb on all ranks."
        ) from error


def _decoded_row(text: bytes, *pngs: bytes) -> list[Any]:
    cells, beside, dates = json.loads(text)
    if not isinstance(cells, list):
        raise TypeError("a row is no list of cells")
    for (place, arguments), png in zip(beside, pngs, strict=True):
        cells[_natural(place)] = Picture(png, {}, _named(arguments))
    for place in dates:
        moment = datetime.fromisoformat(cells[_natural(place)])
        cells[place] = moment if "T" in cells[place] else moment.date()
    return cells


def _decoded_image(text: bytes, png: bytes) -> Picture:
    return Picture(png, {}, _named(json.loads(text)))


def _natural(number: Any) -> int:
    """A rank, a place or a number of items, as it was told."""
    if type(number) is not int or not 0 <= number < LARGEST_EXACT_INTEGER:
        raise ValueError(f"{repr(number)[:_SHOWN]} is no number of a rank or of items")
    return number


def _column(name: Any) -> Any:
    if type(name) not in _PLAIN:
        raise TypeError(f"{repr(name)[:_SHOWN]} is no name of a column")
    return name


def _named(arguments: Any) -> dict[str, Any]:
    """What goes along with a picture; arguments of `wandb.Image`, and none that decides about files."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(_BESIDE):
        raise ValueError(f"{repr(arguments)[:_SHOWN]} does not go along with an image")
    return arguments


# The whole


def fair(wanted: Sequence[int], limit: int) -> list[int]:
    """Shares of a limit, as equal as they can be while nobody gets more than wanted.

    Example:
        >>> fair([1, 100, 100], 21)
        [1, 10, 10]
    """
    shares, left = [0] * len(wanted), limit
    for turn, index in enumerate(sorted(range(len(wanted)), key=wanted.__getitem__)):
        shares[index] = min(wanted[index], left // (len(wanted) - turn))
        left -= shares[index]
    return shares


def whole(kind: Kind, parts: Sequence[Part], files: Files | None = None) -> Any:
    """The table or the images of some ranks as what W&B logs; `None` if there are no images.

    Args:
        kind: Which of the two.
        parts: What ranks give, in their order.
        files: Makes a directory for files of images that came from other ranks; it is needed until the row is written.
    """
    if kind == "images":
        return [_named_image(part.rank, picture, files) for part in parts for picture in part.items] or None
    columns, rows = merged(parts)
    return wandb_media.table_of_any(
        columns,
        [[_wandb_image(cell, files) if isinstance(cell, Picture) else _plain(cell) for cell in row] for row in rows],
    )


def merged(parts: Sequence[Part]) -> tuple[Columns, list[list[Any]]]:
    """Columns and rows of the whole table: columns are matched by their name, where ranks have different ones."""
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
    return columns, rows


def differ(parts: Sequence[Part]) -> bool:
    """Whether ranks gave tables with different columns."""
    return len({tuple(part.columns) for part in _with_rows(parts)}) > 1


def _with_rows(parts: Sequence[Part]) -> Sequence[Part]:
    """Those that decide about columns: a rank without rows does only if nobody has any."""
    return [part for part in parts if part.items] or parts


def _numbered(columns: Iterable[str | int]) -> list[tuple[str | int, int]]:
    """Columns, told apart also where they have the same name."""
    seen: Counter[str | int] = Counter()
    numbered = []
    for name in columns:
        numbered.append((name, seen[name]))
        seen[name] += 1
    return numbered


def _named_image(rank: int, picture: Picture, files: Files | None) -> Any:
    caption = picture.beside.get("caption")
    named = f"rank {rank}" if caption is None else f"rank {rank}: {caption}"
    return _wandb_image(picture._replace(beside={**picture.beside, "caption": named}), files)


def _wandb_image(picture: Picture, files: Files | None) -> Any:
    value, arguments = picture.value, {**picture.pixels, **picture.beside}
    return wandb_media.image(value, files() if files and isinstance(value, bytes) else None, **arguments)
