"""Find the run files below a directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from limits import Limit
from stored import find_runs, touch

from dist_wandb.errors import ReadError
from dist_wandb.wandb_files import finding
from dist_wandb.wandb_files.finding import find_files, natural_order


def test_runs_are_found_at_any_depth_in_natural_order(tmp_path: Path) -> None:
    tenth = touch(tmp_path / "wandb/rank-10/wandb/offline-run-1-a/run-a.wandb")
    second = touch(tmp_path / "wandb/rank-2/wandb/offline-run-1-a/run-a.wandb")
    online = touch(tmp_path / "wandb/run-1-b/run-b.wandb")
    assert find_runs(tmp_path) == [second, tenth, online]


def test_a_restart_within_the_same_second_is_found_after_the_first_start(tmp_path: Path) -> None:
    second = touch(tmp_path / "wandb/offline-run-20260101_000000-a-1/run-a.wandb")  # as wandb names it
    first = touch(tmp_path / "wandb/offline-run-20260101_000000-a/run-a.wandb")
    assert find_runs(tmp_path) == [first, second]


def test_links_below_the_directory_are_not_followed(tmp_path: Path) -> None:
    run = touch(tmp_path / "offline-run-1-a/run-a.wandb")
    (tmp_path / "latest-run").symlink_to(run.parent.name)
    assert find_runs(tmp_path) == [run]


def test_a_run_directory_is_found_through_a_link_and_as_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = touch(tmp_path / "offline-run-1-a/run-a.wandb")
    link = tmp_path / "latest-run"
    link.symlink_to(run.parent.name)
    assert find_runs(link) == [link / run.name]
    monkeypatch.chdir(run.parent)
    assert find_runs(Path()) == [Path(run.name)]


def test_a_single_file_or_a_link_to_it_may_be_given(tmp_path: Path) -> None:
    copy = touch(tmp_path / "copy.wandb")
    (tmp_path / "link.wandb").symlink_to(copy)
    assert find_runs(copy) == find_runs(tmp_path / "link.wandb") == [copy]


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


def test_a_name_is_sorted_by_its_first_characters() -> None:
    """The parts of a name of one megabyte once took 50 times its memory."""
    parts = natural_order("a1" * 500_000)
    assert len(parts) < 1000
    assert natural_order("a" * 600 + "2") < natural_order("a" * 600 + "3")
