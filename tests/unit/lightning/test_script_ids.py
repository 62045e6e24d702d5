"""Base ids that Lightning's main process passes to the scripts that its ddp strategy starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from strangers import give_away

from dist_wandb.lightning.launching import ScriptIds

Child = Callable[..., ScriptIds]


@pytest.fixture(autouse=True)
def _bare(bare_environment: None) -> None:
    """Remove the variables of launchers."""


@pytest.fixture
def place(begin_script: Callable[..., Path]) -> Path:
    return begin_script()


@pytest.fixture
def child(begin_script: Callable[..., Path]) -> Child:
    """Make this process look like its own child that Lightning has started for local rank 1."""

    def be(parent: int | None = None) -> ScriptIds:
        return ScriptIds(begin_script(parent or os.getpid()))

    return be


def file_in(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def test_a_child_takes_the_ids_of_its_parent_in_order_and_offers_nothing(place: Path, child: Child) -> None:
    ids = ScriptIds(place)
    assert (ids.next_id("first"), ids.next_id("second")) == ((0, "first"), (1, "second"))
    ids.offer(0, "of the run")  # known later
    twin = child()
    assert [twin.next_id("own") for _ in range(3)] == [(0, "of the run"), (1, "second"), (2, "own")]
    assert file_in(place).read_text() == '["of the run", "second"]'


def test_what_was_offered_is_that_of_its_moment(place: Path) -> None:
    ids, layers = ScriptIds(place), list[object]([64])
    ids.offer(0, "first", {"config": {"layers": layers}})
    layers.append(object())  # no text of JSON
    ids.offer(1, "second")
    (offered,) = (json.loads(path.read_text()) for path in place.iterdir())
    assert offered == [["first", {"config": {"layers": [64]}}], "second"]


def test_a_child_uses_its_own_id_if_the_parent_offers_none(place: Path, child: Child) -> None:
    ScriptIds(place).offer(1, "second")
    twin = child()
    assert [twin.next_id("mine")[1], twin.next_id("also mine")[1]] == ["mine", "second"]


def test_a_process_without_a_parent_offers_only_its_own_ids(place: Path) -> None:
    ScriptIds(place).next_id("of before")
    assert ScriptIds(place).next_id("own") == (0, "own")
    assert file_in(place).read_text() == '["own"]'
    assert ScriptIds(place / "missing").next_id("first") == (0, "first"), "ids are passed later"


@pytest.mark.parametrize(
    "content", ["", "{", '{"a": 1}', "3", "[1", "[[1]]", "[[]]", "of another user", "of a stranger"]
)
def test_a_file_that_is_not_the_parents_or_damaged_is_ignored(
    place: Path, child: Child, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    ScriptIds(place).next_id("first")
    twin = child()
    if content == "of another user":
        give_away(file_in(place), monkeypatch)
    elif content == "of a stranger":
        twin = child(os.getpid() + 1)
    else:
        file_in(place).write_text(content)
    assert twin.next_id("own") == (0, "own")


def test_only_this_user_may_read_the_file(place: Path) -> None:
    ScriptIds(place).next_id("first")
    assert file_in(place).stat().st_mode & 0o077 == 0


def test_the_file_is_removed_with_its_process_and_the_environment_unchanged(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; before = dict(os.environ); from dist_wandb.lightning.launching import ScriptIds; "
        "ScriptIds().next_id('first'); print(len(list(pathlib.Path(sys.argv[1]).glob('dist-wandb-*')))); "
        "assert dict(os.environ) == before; os.fork() or sys.exit(); os.wait(); "
        "print(len(list(pathlib.Path(sys.argv[1]).glob('dist-wandb-*'))))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-u", "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1"], "the end of a fork removes nothing"
    assert list(tmp_path.iterdir()) == []
