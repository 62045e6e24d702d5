"""Somebody replaces a directory by a link to a private one of this user after it was found or checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from record_files import write_run

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files.finding import find_files
from dist_wandb.wandb_files.reading import read_each, read_run
from dist_wandb.wandb_files.small_files import Directory, read_small


def replace(shared: Path, private: Path) -> None:
    """Put a link to a private directory in the place of a shared one."""
    shared.rename(shared.with_name("moved"))
    shared.symlink_to(private)


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_folder_that_is_removed_or_becomes_a_link_during_the_search_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    private, shared = tmp_path / "private", tmp_path / "shared"
    write_run(private, "secret")
    (shared / "inner").mkdir(parents=True)
    opened = os.open

    def racing(path: Any, *arguments: Any, **options: Any) -> int:
        inner = shared / "inner"
        if Path(path).name == "inner" and inner.is_dir() and not inner.is_symlink():  # as the search has seen
            inner.rmdir() if is_removed else replace(inner, private)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", racing)
    found, errors = find_files(shared)
    assert (found, len(errors)) == ({}, 0 if is_removed else 1)
    assert all(str(error).startswith(f"{shared}/inner: cannot be searched: ") for error in errors)


def test_a_run_directory_that_is_replaced_after_the_search_is_not_read(tmp_path: Path) -> None:
    private = write_run(tmp_path / "private", "exp")
    write_run(tmp_path / "shared", "exp")
    found, errors = find_files(tmp_path / "shared")
    (path,) = found
    assert errors == []
    replace(path.parent, private)
    runs, ((failed, error),) = read_each(found, read_run)
    assert (runs, failed) == ([], path)
    assert "was replaced by another directory meanwhile" in str(error)


@pytest.mark.parametrize("part", ["files", "media", "file"])
def test_no_part_of_a_path_below_a_run_is_a_link(tmp_path: Path, part: str) -> None:
    private, run = tmp_path / "private", tmp_path / "run"
    for top in (private, run):
        (top / "files" / "media").mkdir(parents=True)
        (top / "files" / "media" / "file").write_text(top.name)
    within, path = Directory.at(run), run / "files" / "media" / "file"
    assert read_small(path, within=within) == b"run"
    inner = next(parent for parent in (path, *path.parents) if parent.name == part)
    replace(inner, private / inner.relative_to(run))
    with pytest.raises((OSError, ReadError)):
        read_small(path, within=within)
