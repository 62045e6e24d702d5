"""Tables and images of a run's directory, in which others may write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_wandb.report import media
from dist_wandb.report.media import Budget, LoggedMedia, MediaReader
from dist_wandb.wandb_files.small_files import Directory, read_small


def logged(path: str) -> LoggedMedia:
    found = LoggedMedia()
    found.add("shown", 0.0, {"_type": "table-file", "path": path})
    return found


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
    private, table = write_table(tmp_path / "private", "secret"), write_table(tmp_path / "run", "public")
    within = Directory.at(tmp_path / "run")

    def racing(path: Path, **options: Any) -> bytes:
        folder = table.parents[level - 1]
        folder.rename(tmp_path / "moved")
        folder.symlink_to(private.parents[level - 1])
        return read_small(path, **options)

    reader = MediaReader(tmp_path / "run", Budget(1000), within)
    (shown,) = reader.read(logged("media/table/one.table.json"))[1]
    assert shown.rows == [["public"]]
    monkeypatch.setattr(media, "read_small", racing)
    assert reader.read(logged("media/table/one.table.json")) == ([], [])
    assert reader.notes == ["1 media files that are links, too large, or cannot be read"]
