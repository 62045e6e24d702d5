"""Input of a report from run directories: records of all kinds, pictures, tables."""

from __future__ import annotations

import io
import json
from pathlib import Path

from fuzz_of_files import _ODD, _with_odd_values, decoded, file_of, inspections
from fuzzing import Target
from PIL import Image

from dist_wandb.cli.report import media, sections
from dist_wandb.cli.report.files import FileForReport
from dist_wandb.cli.report.page import json_of
from dist_wandb.cli.report.thinning import Budget
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import Directory, parse_json

_RUN_FILE = Path("/nowhere/offline-run-1-exp/run-exp.wandb")


def _read_inspection(data: bytes) -> None:
    file = FileForReport(_RUN_FILE, Directory(_RUN_FILE.parent, 0, 0), Budget(1000))
    for record in decoded(data):
        file.add(record)
    file.end()
    runs = sections([file], media.MediaReader(1000))
    text = json_of({"runs": runs})
    assert not set("<>&") & set(text)
    (run,) = json.loads(text)["runs"]
    for chart in run["charts"] + run["system"]:
        for line in (chart["line"], *chart["ranks"].values()):
            assert line is None or len(line["x"]) == len(line["y"])
            assert line is None or line["x"] == sorted(line["x"])


def _pictures() -> list[bytes]:
    made = []
    for kind in ("PNG", "JPEG"):
        content = io.BytesIO()
        Image.new("RGB", (5, 4), (1, 2, 3)).save(content, kind)
        made.append(content.getvalue())
    return [b"", *made]


def _read_picture(data: bytes) -> None:
    found = media.checked(data)
    if found is not None:
        kind, width, height = found
        assert kind in ("image/png", "image/jpeg")
        assert 0 < width * height <= 64 * 2**20


def _tables() -> list[bytes]:
    cells = [[1, "a", None], [2.5, {"_type": "image-file"}, [1, 2]]]
    return [
        json.dumps({"columns": ["x", 1, "z"], "data": cells}).encode(),
        b'{"columns": ["a"], "data": [[1], [2], [], ["x", 3]]}',
    ]


def _read_table(data: bytes) -> None:
    found = media.table_of("a", 0, parse_json(data))
    assert len(found["rows"]) <= min(100, found["total"])
    assert all(isinstance(cell, str) and len(cell) <= 300 for row in (found["columns"], *found["rows"]) for cell in row)


TARGETS = (
    Target(
        "report",
        _read_inspection,
        lambda: list(map(file_of, inspections())),
        (ReadError,),
        _ODD,
        lambda data: file_of(_with_odd_values(inspections)(data)),
        300,
    ),
    Target("picture", _read_picture, _pictures, (), (b"IHDR", b"IDAT", b"IEND", b"\xff\xd8", b"\xff\xd9", b"\xff\xda")),
    Target("logged-table", _read_table, _tables, (ValueError,), _ODD, _with_odd_values(_tables)),
)
