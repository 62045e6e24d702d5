"""Cells of tables, and images: as they are logged, copied on the training thread, and as other ranks received them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import as_tensor
from dist_wandb.payloads.framing import excerpt
from dist_wandb.payloads.media import pictures
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = frozenset({int, float, str, bool, type(None)})
OF_PIXELS = ("mode", "file_type")  # arguments of wandb.Image that decide about the pixels
BESIDE = ("caption", "grouping", "classes", "boxes")  # and those that go along as JSON
_PLAIN_ARRAYS = "biufU"  # kinds of numpy arrays whose lists are plain


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


Columns = list[str | int]


class Part(NamedTuple):
    """The contribution of one rank.

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


class Copies:
    """What copying has found.

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
        """The repr of an object that cannot be sent."""
        self.replaced.add(type(value).__name__)
        return repr(value)


def check_pillow() -> None:
    """Raise where images cannot be handled."""
    if importlib.util.find_spec("PIL") is None:
        raise ConfigurationError("W&B needs pillow for images, and it is missing. Run: pip install pillow")


def copied_picture(image: Any, arguments: Mapping[str, Any], copies: Copies) -> Picture:
    """An image, safe from later changes."""
    beside = {name: copied_cell(value, copies) for name, value in arguments.items() if name in BESIDE}
    pixels = {name: value for name, value in arguments.items() if name in OF_PIXELS}
    tensor = as_tensor(image)
    if tensor is not None:
        return Picture(copies.tensor(tensor), pixels, beside)
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
        copies.replaced.add("boxes or masks")
    return Picture(pictures.kept(image), pixels, beside if caption is None else {"caption": caption, **beside})


def copied_cell(cell: Any, copies: Copies, *, is_inner: bool = False) -> Any:
    """A cell of a table, safe from later changes: JSON values, dates, tensors on their way, pictures."""
    if type(cell) in PLAIN:
        return cell
    tensor = as_tensor(cell)
    if tensor is not None and not tensor.is_complex():
        return tensor.item() if tensor.is_cpu and not tensor.dim() else copies.tensor(tensor)
    if isinstance(cell, (list, tuple, Mapping)):
        return _container(cell, copies)
    if isinstance(cell, date):
        moment = _moment(cell)
        return moment.isoformat() if is_inner and moment else moment
    if not is_inner and pictures.is_image(cell):
        check_pillow()
        return copied_picture(cell, {}, copies)
    return _other(cell, copies, is_inner=is_inner)


def _container(cell: Any, copies: Copies) -> Any:
    """A list or a mapping of cells, as far as JSON can hold it."""
    if not isinstance(cell, Mapping):
        return [copied_cell(item, copies, is_inner=True) for item in cell]
    if not PLAIN.issuperset(map(type, cell)):
        return copies.represented(cell)
    return {name: copied_cell(item, copies, is_inner=True) for name, item in cell.items()}


def _other(cell: Any, copies: Copies, *, is_inner: bool) -> Any:
    """Numbers and text of other kinds than Python's own, and arrays, as far as JSON can hold them; else the repr."""
    for kind in (str, int, float):
        if isinstance(cell, kind):
            return kind(cell)
    if as_tensor(cell) is not None or not (hasattr(cell, "dtype") and hasattr(cell, "tolist")):
        return copies.represented(cell)
    plain = cell.tolist()
    if cell.dtype.kind in _PLAIN_ARRAYS:
        return plain
    return copies.represented(cell) if type(plain) is type(cell) else copied_cell(plain, copies, is_inner=is_inner)


def _moment(cell: date) -> date | None:
    """A date, or a date with a time, of Python's own kind; `None` for pandas' missing dates."""
    if cell != cell:  # noqa: PLR0124
        return None
    return datetime.combine(cell.date(), cell.timetz()) if isinstance(cell, datetime) else cell


def json_of(value: Any) -> Any:
    """A JSON value for a cell of a type that JSON does not know."""
    return value.isoformat() if isinstance(value, date) else plain_cell(value)


def plain_cell(cell: Any) -> Any:
    """A cell with lists in place of tensors."""
    if type(cell) in PLAIN:
        return cell
    if isinstance(cell, list):
        return [plain_cell(item) for item in cell]
    if isinstance(cell, dict):
        return {name: plain_cell(item) for name, item in cell.items()}
    tensor = as_tensor(cell)
    return cell if tensor is None else tensor.tolist()


def natural(number: Any) -> int:
    """A received rank, index or number of items."""
    if type(number) is not int or not 0 <= number < LARGEST_EXACT_INTEGER:
        raise ValueError(f"{excerpt(number)} is not a number of a rank or of items")
    return number


def named_arguments(arguments: Any) -> dict[str, Any]:
    """The other arguments of `wandb.Image` for a picture; none that decides about files."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(BESIDE):
        raise ValueError(f"{excerpt(arguments)} does not go along with an image")
    return arguments
