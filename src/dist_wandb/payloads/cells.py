"""Cells of tables, and images: copies made on the training thread, and values received from other ranks.

Images of PIL and W&B are converted to PNG files. As in W&B, pillow is needed only for images.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import date, datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dist_wandb.errors import ConfigurationError
from dist_wandb.payloads.devices import HostCopy, as_tensor
from dist_wandb.payloads.framing import excerpt
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = frozenset({int, float, str, bool, type(None)})
OF_PIXELS = ("mode", "file_type")  # arguments of wandb.Image that determine the pixels
BESIDE = ("caption", "grouping", "classes", "boxes")  # arguments of wandb.Image that are sent as JSON
_PLAIN_ARRAYS = "biufU"  # kinds of numpy arrays whose `tolist` returns plain values
MakeImage = Callable[..., Any]  # makes a `wandb.Image` from the same arguments

_AS_PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # modes of PIL that a PNG can hold
_loading = threading.Lock()  # Pillow may know no PNG if two threads, each of which encodes an image, load it at once


class Picture(NamedTuple):
    """An image that was logged, or received from another rank."""

    value: Any  # an argument of `wandb.Image`; from another rank, the bytes of a PNG file
    pixels: Mapping[str, Any]  # arguments of `wandb.Image` that determine the pixels
    beside: Mapping[str, Any]  # other arguments of `wandb.Image`, such as the caption


Columns = list[str | int]


class Part(NamedTuple):
    """The contribution of one rank."""

    rank: int  # index of the rank in the job
    columns: Columns  # names of a table's columns; empty for images
    total: int  # number of rows or images that it logged
    items: list[Any]  # the rows or images within the limit


class Copies:
    """Makes copies, and collects what to wait for and to warn about."""

    def __init__(self) -> None:
        self.under_way: list[HostCopy] = []
        self.replaced: set[str] = set()  # names of types whose objects were replaced by their repr

    def tensor(self, tensor: Tensor) -> Tensor | HostCopy:
        """Return a copy of a tensor; of one on a device, an asynchronous one, to be replaced by `arrived`."""
        if tensor.device.type == "cpu":
            return tensor.detach().clone()
        self.under_way.append(HostCopy(tensor))
        return self.under_way[-1]

    def represented(self, value: object) -> str:
        self.replaced.add(type(value).__name__)
        return repr(value)


def check_pillow() -> None:
    if importlib.util.find_spec("PIL") is None:
        raise ConfigurationError("W&B needs pillow for images, and it is missing. Run: pip install pillow")


def copied_picture(image: Any, arguments: Mapping[str, Any], copies: Copies) -> Picture:
    """Return a copy of an image, with those arguments of `wandb.Image` that are kept."""
    beside = {name: copied_cell(value, copies) for name, value in arguments.items() if name in BESIDE}
    pixels = {name: value for name, value in arguments.items() if name in OF_PIXELS}
    tensor = as_tensor(image)
    if tensor is not None:
        return Picture(copies.tensor(tensor), pixels, beside)
    if type(image).__name__ == "ndarray":
        return Picture(image.copy(), pixels, beside)
    if isinstance(image, (str, os.PathLike)):
        return Picture(opened_image(Path(image).read_bytes()), pixels, beside)
    if hasattr(image, "savefig"):
        file = BytesIO()
        image.savefig(file, format="png")
        return Picture(opened_image(file.getvalue()), pixels, beside)
    if not is_image(image):
        raise ConfigurationError(
            f"gathered was given {type(image).__name__} among images. Pass arrays, tensors, PIL images, paths, figures "
            "or wandb.Image; rows of a table together with columns=[...]."
        )
    caption = getattr(image, "_caption", None)  # it has no public name, and neither have the other attributes here
    if getattr(image, "_boxes", None) or getattr(image, "_masks", None):
        copies.replaced.add("boxes or masks")
    kept = image.copy() if hasattr(image, "copy") else image  # a wandb.Image never changes
    return Picture(kept, pixels, {"caption": caption, **beside} if isinstance(caption, str) else beside)


def copied_cell(cell: Any, copies: Copies, *, is_inner: bool = False) -> Any:
    """Return a copy of a cell: a JSON value, a date, a tensor (which may be copied asynchronously) or a `Picture`."""
    if type(cell) in PLAIN:
        return cell
    tensor = as_tensor(cell)
    if tensor is not None and not tensor.is_complex():
        return tensor.item() if tensor.is_cpu and not tensor.dim() else copies.tensor(tensor)
    if isinstance(cell, (list, tuple)):
        return [copied_cell(item, copies, is_inner=True) for item in cell]
    if isinstance(cell, Mapping) and PLAIN.issuperset(map(type, cell)):  # names that JSON can represent
        return {name: copied_cell(item, copies, is_inner=True) for name, item in cell.items()}
    if isinstance(cell, date):
        if cell != cell:  # noqa: PLR0124  # a missing date of pandas
            cell = None
        elif isinstance(cell, datetime):  # of the plain type
            cell = datetime.combine(cell.date(), cell.timetz())
        return cell.isoformat() if is_inner and cell else cell
    return _other(cell, copies, is_inner=is_inner)


def _other(cell: Any, copies: Copies, *, is_inner: bool) -> Any:
    """Copy an image; convert numbers and text of other types, and arrays, to JSON values, other objects to text."""
    if not is_inner and is_image(cell):
        check_pillow()
        return copied_picture(cell, {}, copies)
    for kind in (str, int, float):
        if isinstance(cell, kind):
            return kind(cell)
    if as_tensor(cell) is not None or not (hasattr(cell, "dtype") and hasattr(cell, "tolist")):
        return copies.represented(cell)
    plain = cell.tolist()
    if cell.dtype.kind in _PLAIN_ARRAYS:
        return plain
    return copies.represented(cell) if type(plain) is type(cell) else copied_cell(plain, copies, is_inner=is_inner)


def plain_cell(cell: Any) -> Any:
    if type(cell) in PLAIN:
        return cell
    if isinstance(cell, list):
        return [plain_cell(item) for item in cell]
    if isinstance(cell, dict):
        return {name: plain_cell(item) for name, item in cell.items()}
    tensor = as_tensor(cell)
    return cell if tensor is None else tensor.tolist()


def natural(number: Any) -> int:
    """Check a received rank, index or number of items."""
    if type(number) is not int or not 0 <= number < LARGEST_EXACT_INTEGER:
        raise ValueError(f"{excerpt(number)} is not a number of a rank or of items")
    return number


def named_arguments(arguments: Any) -> dict[str, Any]:
    """Check received arguments of `wandb.Image`, which must not include any that access files."""
    if not isinstance(arguments, dict) or not set(arguments) <= set(BESIDE):
        raise ValueError(f"{excerpt(arguments)} are not arguments of an image")
    return arguments


def is_image(value: object) -> bool:
    """Return whether a value is a PIL image or a `wandb.Image`. Imports neither."""
    names = (("PIL.Image", "Image"), ("wandb", "Image"))
    known = [getattr(sys.modules.get(module), name, None) for module, name in names]
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in known)


def opened_image(data: bytes) -> Any:
    """Open an image file as a PIL image, which reads the pixels when they are needed."""
    from PIL import Image

    return Image.open(BytesIO(data))


def png_of(image: Any, how: Mapping[str, Any], make_image: MakeImage) -> bytes:
    """Return a PNG file with the pixels that `wandb.Image(image, **how)` would show."""
    with _loading:
        from PIL import PngImagePlugin  # noqa: F401
    if hasattr(image, "save"):
        return _saved(image)
    made = image if is_image(image) else make_image(image, **how)
    held = getattr(made, "_path", None)
    path = Path(held) if isinstance(held, str) else None
    try:
        is_png = path is not None and path.suffix == ".png" and path.is_file()
        return path.read_bytes() if path is not None and is_png else _saved(made.image)
    finally:
        if made is not image and path is not None:
            path.unlink(missing_ok=True)  # wandb keeps its files until the process ends, or a run takes them over


def _saved(picture: Any) -> bytes:
    file = BytesIO()
    (picture if picture.mode in _AS_PNG else picture.convert("RGB")).save(file, format="PNG")
    return file.getvalue()
