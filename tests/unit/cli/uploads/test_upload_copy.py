"""The private copy of a run's files: it has only regular files, and the run's own files are never written to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from offline_runs import fill_disk

from dist_wandb.cli.uploads.contents import copy_file, copy_files, entries_below
from dist_wandb.errors import ReadError, UploadError
from dist_wandb.wandb_files.small_files import KINDS, Directory

LARGE = bytes(1 << 20)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    files = tmp_path / "files"
    (files / "media" / "images").mkdir(parents=True)
    (files / "media" / "images" / "small.png").write_bytes(b"small")
    (files / "media" / "large.mp4").write_bytes(LARGE)
    (files / "config.yaml").write_bytes(LARGE)
    return files


def copied(files: Path, *, follow: bool = False, leave_out: frozenset[str] = frozenset()) -> dict[str, Path]:
    target = files.parent / "copy"
    copy_files(files, target, Directory.at(files.parent), follow=follow, leave_out=leave_out)
    return {str(path.relative_to(target)): path for path in target.rglob("*") if not path.is_dir()}


def test_large_files_are_linked_except_those_that_w_and_b_writes(files: Path) -> None:
    found = copied(files, leave_out=frozenset({"media/images/small.png"}))
    assert found.keys() == {"config.yaml", "media/large.mp4"}
    assert found["media/large.mp4"].samefile(files / "media" / "large.mp4")
    assert not found["config.yaml"].samefile(files / "config.yaml")
    assert found["config.yaml"].read_bytes() == LARGE


@pytest.mark.parametrize("can_link", [False, True])
def test_the_file_that_was_checked_is_linked_or_copied_although_its_path_is_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    large, really = files / "media" / "large.mp4", os.link

    def racing(*arguments: Any, **options: Any) -> None:
        large.rename(tmp_path / "moved")
        large.symlink_to(tmp_path / "secret")
        if not can_link:
            raise OSError(18, "Invalid cross-device link")
        really(*arguments, **options)

    monkeypatch.setattr(os, "link", racing)
    found = copied(files)["media/large.mp4"]
    assert (found.read_bytes(), found.samefile(tmp_path / "moved")) == (LARGE, can_link)


def test_without_disk_space_nothing_is_copied(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch, free=1 << 20)
    with pytest.raises(UploadError, match=r"not enough space for a copy\. Set XDG_STATE_HOME"):
        copied(files)


def test_pipes_are_left_out_without_blocking(files: Path) -> None:
    os.mkfifo(files / "pipe")
    assert [KINDS[kind] for path, kind in entries_below(files, Directory.at(files.parent)) if path.name == "pipe"] == [
        "a named pipe"
    ]
    assert copied(files).keys() == {"config.yaml", "media/large.mp4", "media/images/small.png"}


@pytest.mark.parametrize("name", ["link", "media/link"])
def test_links_are_followed_only_on_request(files: Path, tmp_path: Path, name: str) -> None:
    """They may also have replaced a file, or its folder, since they were listed."""
    (tmp_path / "saved").write_bytes(b"by wandb.save")
    (files / name).symlink_to(tmp_path / "saved")
    with pytest.raises(UploadError, match="is a symbolic link"):
        copied(files)
    shutil.rmtree(tmp_path / "copy")
    (files / "shown").symlink_to(files / "media")
    for path in (files / "shown" / "large.mp4", files / name):
        with pytest.raises((OSError, ReadError), match=r"shown|is a symbolic link"):
            copy_file(path, tmp_path / "two", Directory.at(files))
    assert not (tmp_path / "two").exists()
    (files / "shown").unlink()
    found = copied(files, follow=True)
    assert (found[name].read_bytes(), found[name].is_symlink()) == (b"by wandb.save", False)


def test_deeply_nested_folders_are_refused(files: Path) -> None:
    deep = files
    for _ in range(33):
        deep /= "d"
        deep.mkdir()
    with pytest.raises(ReadError, match="more than 32 folders are nested"):
        copied(files)
