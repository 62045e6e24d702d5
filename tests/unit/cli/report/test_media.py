"""Tables and images of a run's directory, in which others may write."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from record_files import end, header, run, write_run
from report_runs import history, jpeg, png

from dist_wandb.cli.report import build, media
from dist_wandb.cli.report.media import checked
from dist_wandb.wandb_files.small_files import read_small

HEAD = b"\x89PNG\r\n\x1a\n"
VALUE = {"_type": "table-file", "path": "media/table/one.table.json"}


def write_table(directory: Path, text: str) -> Path:
    table = directory / "files" / "media" / "table" / "one.table.json"
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"columns": ["text"], "data": [[text]]}))
    return table


@pytest.mark.newest  # wandb 0.31 is the first that reads its own files
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_folder_that_becomes_a_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """It is replaced just before the file is opened: after all checks of its path."""
    directory = write_run(tmp_path / "runs", records=[header(), run(), history({"shown": VALUE}), end()])
    private, table = write_table(tmp_path / "private", "secret"), write_table(directory, "public")

    def racing(path: Path, **options: Any) -> bytes:
        folder = table.parents[level - 1]
        folder.rename(tmp_path / "moved")
        folder.symlink_to(private.parents[level - 1])
        return read_small(path, **options)

    (before,) = build([tmp_path / "runs"]).runs
    assert before.tables[0].rows == [["public"]]
    monkeypatch.setattr(media, "read_small", racing)
    (after,) = build([tmp_path / "runs"]).runs
    assert (after.images, after.tables) == ([], [])
    assert after.notes == ["1 media files that are links, too large, or cannot be read"]


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
