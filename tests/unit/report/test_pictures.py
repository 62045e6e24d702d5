from __future__ import annotations

import struct
import zlib

import pytest
from report_runs import jpeg, png

from dist_wandb.report.media import checked

HEAD = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def small_png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return HEAD + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


def test_valid_images_are_accepted_with_type_and_size() -> None:
    assert checked(png(20, 10)) == ("image/png", 20, 10)
    assert checked(jpeg()) == ("image/jpeg", 24, 16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        HEAD,
        b"GIF89a" + bytes(100),
        b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
        HEAD + chunk(b"IDAT", b"x") + chunk(b"IEND", b""),
        HEAD + b"\xff\xff\xff\xffIHDR" + bytes(20),
        small_png(0, 1),
        small_png(16_385, 1),
        small_png(16_000, 16_000),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8" + b"\xff\xe0\x00\x00" * 1000 + b"\xff\xd9",
    ],
)
def test_other_bytes_are_rejected(content: bytes) -> None:
    assert checked(content) is None
