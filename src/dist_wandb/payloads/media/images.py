"""Images of all ranks as one panel: copying, encoding as PNG and JSON, decoding and merging."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.payloads.framing import framed
from dist_wandb.payloads.media import pictures
from dist_wandb.payloads.media.cells import (
    BESIDE,
    OF_PIXELS,
    Copies,
    Part,
    Picture,
    check_pillow,
    copied_picture,
    json_of,
    named_arguments,
)
from dist_wandb.payloads.media.pictures import MakeImage


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
    return framed(beside, pictures.png(picture.value, picture.pixels, make_image))


def decoded_image(text: bytes, png: bytes) -> Picture:
    """Decode the framed parts of `encoded_image`."""
    return Picture(png, {}, named_arguments(json.loads(text)))


def merged_images(parts: Sequence[Part]) -> MergedImages | None:
    """Return all images, with captions that begin with the rank; `None` if there are none."""
    pictures = [_captioned(part.rank, picture) for part in parts for picture in part.items]
    return MergedImages(pictures) if pictures else None


def _captioned(rank: int, picture: Picture) -> Picture:
    caption = picture.beside.get("caption")
    caption = f"rank {rank}" if caption is None else f"rank {rank}: {caption}"
    return picture._replace(beside={**picture.beside, "caption": caption})
