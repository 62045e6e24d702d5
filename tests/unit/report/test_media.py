"""Tables and images of a run's directory, in which others may write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record_files import end, header, run, write_run
from report_runs import history

from dist_wandb.report import media
from dist_wandb.report.building import build
from dist_wandb.wandb_files.small_files import read_small

pytestmark = pytest.mark.newest  # wandb 0.31 is the first that reads its own files
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

    (before,) = build([tmp_path / "runs"]).runs
    assert before.tables[0].rows == [["public"]]
    monkeypatch.setattr(media, "read_small", racing)
    (after,) = build([tmp_path / "runs"]).runs
    assert (after.images, after.tables) == ([], [])
    assert after.notes == ["1 media files that are links, too large, or cannot be read"]
