"""Tables and images of a run's directory, in which others may write."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from record_files import end, header, run, write_run
from report_runs import history, one_run, png

from dist_wandb.cli.report import build, media
from dist_wandb.wandb_files.small_files import read_small

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files
HEAD = b"\x89PNG\r\n\x1a\n"
VALUE = {"_type": "table-file", "path": "media/table/one.table.json"}


def write_table(directory: Path, text: str) -> Path:
    table = directory / "files" / "media" / "table" / "one.table.json"
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"columns": ["text"], "data": [[text]]}))
    return table


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

    (before,) = build([tmp_path / "runs"])["runs"]
    assert before["tables"][0]["rows"] == [["public"]]
    monkeypatch.setattr(media, "read_small", racing)
    (after,) = build([tmp_path / "runs"])["runs"]
    assert (after["images"], after["tables"]) == ([], [])
    assert after["notes"] == ["1 media files that are links, too large, or cannot be read"]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def small_png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return HEAD + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")


def media_run(top: Path, path: str) -> Path:
    value = {"_type": "image-file", "path": path}
    return write_run(top, records=[header(), run(), history({"img": value, "_step": 0}), end()])


@pytest.mark.parametrize("path", ["../../../../secret.png", "link/secret.png", "media/link.png", "/etc/passwd", "a\0b"])
def test_no_image_outside_the_run_directory_is_shown(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    directory = media_run(tmp_path / "runs", path)
    (directory / "files" / "link").symlink_to(tmp_path)
    (directory / "files" / "media").mkdir()
    (directory / "files" / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    found = one_run(tmp_path / "runs")
    assert found["images"] == []
    assert len(found["notes"]) == 1


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, "missing"),
        (b"\x89PNG" + bytes(2**20), "too large"),
        (b"", "not valid PNG"),
        (HEAD, "not valid PNG"),
        (b"GIF89a" + bytes(100), "not valid PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "not valid PNG"),
        (HEAD + chunk(b"IDAT", b"x") + chunk(b"IEND", b""), "not valid PNG"),
        (HEAD + b"\xff\xff\xff\xffIHDR" + bytes(20), "not valid PNG"),
        (small_png(0, 1), "not valid PNG"),
        (small_png(16_385, 1), "not valid PNG"),
        (small_png(16_000, 16_000), "not valid PNG"),
        (b"\xff\xd8\xff\xd9", "not valid PNG"),
        (b"\xff\xd8" + b"\xff\xe0\x00\x00" * 1000 + b"\xff\xd9", "not valid PNG"),
    ],
)
def test_an_invalid_image_is_reported(tmp_path: Path, content: bytes | None, note: str) -> None:
    directory = media_run(tmp_path, "a.png")
    if content is not None:
        (directory / "files" / "a.png").write_bytes(content)
    found = one_run(tmp_path)
    assert found["images"] == []
    assert note in found["notes"][0]


@pytest.mark.parametrize("content", ["[]", "{}", '{"columns": 1, "data": []}', "[" * 100_000, "\x80"])
def test_an_invalid_table_is_reported(tmp_path: Path, content: str) -> None:
    value = {"_type": "table-file", "path": "t.json"}
    directory = write_run(tmp_path, records=[header(), run(), history({"t": value, "_step": 0}), end()])
    (directory / "files" / "t.json").write_bytes(content.encode("latin-1"))
    assert one_run(tmp_path)["notes"] == ["1 tables that are not in W&B's format"]
