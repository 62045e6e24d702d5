"""Conversion of images of PIL and W&B to PNG files. As in W&B, pillow is needed only for images."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

MakeImage = Callable[..., Any]  # makes a `wandb.Image` from the same arguments

_AS_PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")  # modes of PIL that a PNG can hold


def is_image(value: object) -> bool:
    """Return whether a value is a PIL image or a `wandb.Image`. Imports neither."""
    names = (("PIL.Image", "Image"), ("wandb", "Image"))
    known = [getattr(sys.modules.get(module), name, None) for module, name in names]
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in known)


def caption(image: object) -> str | None:
    """Return the caption of a `wandb.Image`; `None` for PIL images."""
    text = getattr(image, "_caption", None)  # it has no public name, and neither have the other attributes here
    return text if isinstance(text, str) else None


def has_overlays(image: object) -> bool:
    """Return whether a `wandb.Image` has boxes or masks."""
    return bool(getattr(image, "_boxes", None) or getattr(image, "_masks", None))


def kept(image: Any) -> Any:
    """Return a copy of a PIL image, or a `wandb.Image` itself, because it never changes."""
    return image.copy() if hasattr(image, "copy") else image


def opened(data: bytes) -> Any:
    """Open an image file as a PIL image, which reads the pixels when they are needed."""
    from PIL import Image

    return Image.open(BytesIO(data))


def of_figure(figure: Any) -> Any:
    """Convert a matplotlib figure to a PIL image."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return opened(file.getvalue())


def png(image: Any, how: Mapping[str, Any], make_image: MakeImage) -> bytes:
    """Return a PNG file with the pixels that `wandb.Image(image, **how)` would show."""
    if hasattr(image, "save"):
        return _saved(image)
    if is_image(image):
        return _file_in(image)
    made = make_image(image, **how)
    try:
        return _file_in(made)
    finally:
        path = _path_of(made)
        if path is not None:
            path.unlink(missing_ok=True)  # wandb keeps its files until the process ends, or a run takes them over


def _file_in(image: Any) -> bytes:
    """Return the file of a `wandb.Image` if it is a PNG; otherwise encode its pixels."""
    path = _path_of(image)
    if path is not None and path.suffix == ".png" and path.is_file():
        return path.read_bytes()
    return _saved(image.image)


def _path_of(image: object) -> Path | None:
    path = getattr(image, "_path", None)
    return Path(path) if isinstance(path, str) else None


def _saved(picture: Any) -> bytes:
    file = BytesIO()
    (picture if picture.mode in _AS_PNG else picture.convert("RGB")).save(file, format="PNG")
    return file.getvalue()
