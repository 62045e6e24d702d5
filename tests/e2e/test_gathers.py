"""Tables and images of all ranks in every integration: the files on disk, as W&B's own readers see them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from history import history_of
from PIL import Image
from processes import run_job, torchrun
from stored import ended_runs

from dist_wandb.wandb_files.reading import StoredRun

SCRIPT = Path(__file__).parent / "scripts" / "gathers.py"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the job's runs."""
    into = tmp_path_factory.mktemp("gathers")
    run_job(*torchrun(SCRIPT, into), cwd=into).check()
    return into


def table_in(run: StoredRun, name: str) -> dict[str, Any]:
    """Return a table that W&B has written to a separate file."""
    (path,) = (run.path.parent / "files" / "media" / "table").glob(f"{name}_*.table.json")
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def check_table(run: StoredRun) -> None:
    table = table_in(run, "table")
    assert table["columns"] == ["rank", "text", "score", "image"]
    (zero, *ones) = table["data"]
    assert zero[:3] == [0, "é 0-0", 0.5]
    assert [row[:2] for row in ones] == [[1, "é 1-0"], [1, "é 1-1"]]
    assert all(math.isnan(row[2]) for row in ones)
    assert [row[3] for row in table["data"]] == ["Image"] * 3, "W&B writes images of tables like this offline"


def check_images(run: StoredRun, captions: list[str], x: str, colors: list[int]) -> None:
    rows = history_of(run, x)
    (panel,) = rows.rows_with("images.filenames")
    assert panel[x] == 2
    assert panel["images.captions"] == captions
    files = [run.path.parent / "files" / name for name in panel["images.filenames"]]
    assert [Image.open(file).getpixel((0, 0)) for file in files] == [(color,) * 3 for color in colors]


@pytest.mark.parametrize("run_mode", ["auto", "shared"])
def test_through_lightning(directory: Path, run_mode: str) -> None:
    primary, *others = ended_runs(directory / run_mode, 1 if run_mode == "auto" else 2)
    check_table(primary)
    check_images(primary, ["rank 0: of 0", "rank 1: of 1"], "trainer/global_step", [100, 101])
    assert table_in(primary, "one") == {"columns": ["rank", "a"], "data": [[1, 1]]}
    for other in others:
        assert not list(other.path.parent.glob("files/media/**/*.*"))


def test_through_accelerate(directory: Path) -> None:
    (run,) = ended_runs(directory / "accelerate", 1)
    check_table(run)
    check_images(run, ["rank 0", "rank 1", "rank 1"], "global_step", [100, 101, 101])
