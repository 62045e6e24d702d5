"""Find the run files below a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from limits import Limit
from record_files import write_run
from stored import find_runs, touch

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import finding
from dist_wandb.wandb_files.finding import find_files, natural_order
from dist_wandb.wandb_files.reading import read_each, read_run


def test_runs_are_found_at_any_depth_in_natural_order(tmp_path: Path) -> None:
    tenth = touch(tmp_path / "wandb/rank-10/wandb/offline-run-1-a/run-a.wandb")
    second = touch(tmp_path / "wandb/rank-2/wandb/offline-run-1-a/run-a.wandb")
    online = touch(tmp_path / "wandb/run-1-b/run-b.wandb")
    again = touch(tmp_path / "z/offline-run-20260101_000000-a-1/run-a.wandb")  # a restart within the same second
    first = touch(tmp_path / "z/offline-run-20260101_000000-a/run-a.wandb")
    assert find_runs(tmp_path) == [second, tenth, online, first, again]
    parts = natural_order("a1" * 500_000)  # once 50 times the memory of the name
    assert len(parts) < 1000
    assert natural_order("a" * 600 + "2") < natural_order("a" * 600 + "3")


def test_links_are_followed_only_if_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = touch(tmp_path / "offline-run-1-a/run-a.wandb")
    link = tmp_path / "latest-run"
    link.symlink_to(run.parent.name)
    assert find_runs(tmp_path) == [run]
    assert find_runs(link) == [link / run.name]
    copy = touch(tmp_path / "copy" / "copy.wandb")
    (tmp_path / "link.wandb").symlink_to(copy)
    assert find_runs(copy) == find_runs(tmp_path / "link.wandb") == [copy]
    monkeypatch.chdir(run.parent)
    assert find_runs(Path()) == [Path(run.name)]


@pytest.mark.parametrize(("name", "reason"), [("missing", "No such file or directory"), ("file", "Not a directory")])
def test_a_path_that_is_not_a_directory_is_named(tmp_path: Path, name: str, reason: str) -> None:
    touch(tmp_path / "file")
    with pytest.raises(ReadError, match=f"{name}': {reason}. Give an existing directory"):
        find_runs(tmp_path / name)


def test_the_search_of_an_endless_tree_ends(tmp_path: Path, limit: Limit) -> None:
    run = touch(tmp_path / "offline-run-1-a/run-a.wandb")
    touch(tmp_path / "/".join("d" * 70) / "offline-run-1-b/run-b.wandb")
    found, (error,) = find_files(tmp_path)
    assert list(found) == [run]
    assert str(error).endswith(f": is more than 64 levels below {tmp_path}.")
    limit(finding, _MOST_ENTRIES=10)
    found, (error,) = find_files(tmp_path)
    assert list(found) == [run]
    assert "only 10 entries are searched" in str(error)


# --- a directory becomes a link to a private one of this user after it was found --------------------------------------


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
