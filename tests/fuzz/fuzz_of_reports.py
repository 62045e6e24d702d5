"""Input of a report from run directories: records of all kinds, pictures, tables."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fuzz_of_files import _ODD, _lines_of, _with_odd_values, decoded, file_of
from fuzzing import Target
from PIL import Image

from dist_wandb.cli.report import media
from dist_wandb.cli.report.building import sections
from dist_wandb.cli.report.files import FileForReport
from dist_wandb.cli.report.page import Report, json_of
from dist_wandb.cli.report.thinning import Budget
from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.small_files import Directory, parse_json

_RUN_FILE = Path("/nowhere/offline-run-1-exp/run-exp.wandb")


def _inspections() -> list[bytes]:
    spread = {"time/step": 1.0, "time/step/min": 0.5, "time/step/max": 2.0, "time/step/argmax_rank": 3}
    row = {"_step": 1, "global_step": 10, "loss": "NaN", **spread, "rank-1/loss": 2, "dist_wandb/degraded": 1}
    straggler = {"time/straggler_rank": 1, "time/straggler_excess": 0.1, "global_step": 11, "rank-0/loss": 1}
    table = {"table._type": "table-file", "table.path": "media/table/a.table.json", "table.ncols": 2}
    picture = {"image._type": "image-file", "image.path": "media/images/a.png", "image.width": 28}
    contents: Iterable[tuple[str, dict[str, Any]]] = (
        ("run", {"run_id": "exp", "display_name": "night", "config": {"update": {"lr": 0.1, "net": {"deep": [1]}}}}),
        ("environment", {"host": "node", "gpu_count": 8, "program": "a.py", "args": ["--token", "x"], "git": {}}),
        ("metric", {"glob_name": "*", "step_metric": "global_step"}),
        ("metric", {"name": "val/acc", "step_metric": "epoch"}),
        ("history", {"item": row}),
        ("history", {"item": {**straggler, **table, **picture, "val.acc": 0.5}}),
        ("stats", {"item": {"system.gpu.0.temp": 50, "system.cpu/l:rank-1": 1.5}, "timestamp": "2026-01-01T00:00:00Z"}),
        ("stats", {"item": {"system.gpu.1.temp": 51}, "timestamp": "2026-01-01T00:00:10.123456789+02:00"}),
        ("output_raw", {"line": "10 %\r20 %\x1b[2J\nlast", "output_type": "STDOUT"}),
        ("summary", {"update": {"loss": 1}}),
        ("exit", {"exit_code": 1}),
    )
    lines = [{"num": number, "type": kind, kind: content} for number, (kind, content) in enumerate(contents, 1)]
    return [_lines_of(*lines), _lines_of(*lines[:5]), _lines_of(*lines[:2], *lines[3:8] * 10)]


def _read_inspection(data: bytes) -> None:
    file = FileForReport(Budget(1000))
    for record in decoded(data):
        file.add(record)
    file.end(_RUN_FILE, [], Directory(_RUN_FILE.parent, 0, 0))
    runs = sections([file], media.MediaReader(1000))
    text = json_of(Report(["d"], "now", "1", runs, []))
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
        assert found.kind in ("image/png", "image/jpeg")
        assert 0 < found.width * found.height <= 64 * 2**20


def _tables() -> list[bytes]:
    cells = [[1, "a", None], [2.5, {"_type": "image-file"}, [1, 2]]]
    return [
        json.dumps({"columns": ["x", 1, "z"], "data": cells}).encode(),
        b'{"columns": ["a"], "data": [[1], [2], [], ["x", 3]]}',
    ]


def _read_table(data: bytes) -> None:
    found = media.table_of("a", 0, parse_json(data))
    assert len(found.rows) <= min(100, found.total)
    assert all(isinstance(cell, str) and len(cell) <= 300 for row in (found.columns, *found.rows) for cell in row)


TARGETS = (
    Target(
        "report",
        _read_inspection,
        lambda: list(map(file_of, _inspections())),
        (ReadError,),
        _ODD,
        lambda data: file_of(_with_odd_values(_inspections)(data)),
        300,
    ),
    Target("picture", _read_picture, _pictures, (), (b"IHDR", b"IDAT", b"IEND", b"\xff\xd8", b"\xff\xd9", b"\xff\xda")),
    Target("logged-table", _read_table, _tables, (ValueError,), _ODD, _with_odd_values(_tables)),
)
