"""Base ids that Lightning's main process passes to the scripts that its ddp strategy starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_wandb.lightning.launching import ScriptIds
from dist_wandb.session.inherited_rank import told

Child = Callable[..., ScriptIds]
BeginScript = Callable[..., None]


@pytest.fixture(autouse=True)
def _bare(bare_environment: None) -> None:
    """Remove the variables of launchers."""


@pytest.fixture(autouse=True)
def main_process(begin_script: BeginScript) -> None:
    begin_script()


@pytest.fixture
def child(begin_script: BeginScript) -> Child:
    """Make this process look like its own child that Lightning has started for local rank 1."""

    def be(parent: int | None = None) -> ScriptIds:
        begin_script(parent or os.getpid())
        return ScriptIds()

    return be


def test_a_child_takes_the_ids_of_its_parent_in_order_and_offers_nothing(child: Child) -> None:
    ids = ScriptIds()
    assert (ids.next_id("first"), ids.next_id("second")) == ((0, "first"), (1, "second"))
    ids.offer(0, "of the run")  # known later
    twin = child()
    assert [twin.next_id("own") for _ in range(3)] == [(0, "of the run"), (1, "second"), (2, "own")]
    assert told("ids", os.getpid()) == ["of the run", "second"]


def test_what_was_offered_is_that_of_its_moment() -> None:
    ids, layers = ScriptIds(), list[object]([64])
    ids.offer(0, "first", {"config": {"layers": layers}})
    layers.append(object())  # no text of JSON
    ids.offer(1, "second")
    assert told("ids", os.getpid()) == [["first", {"config": {"layers": [64]}}], "second"]


def test_a_child_uses_its_own_id_if_the_parent_offers_none(child: Child) -> None:
    ScriptIds().offer(1, "second")
    twin = child()
    assert [twin.next_id("mine")[1], twin.next_id("also mine")[1]] == ["mine", "second"]
    assert child(os.getpid() + 1).next_id("own") == (0, "own")


def test_a_process_without_a_parent_offers_only_its_own_ids(temporary: Path) -> None:
    ScriptIds().next_id("of before")
    assert ScriptIds().next_id("own") == (0, "own")
    assert told("ids", os.getpid()) == ["own"]
    temporary.rmdir()
    assert ScriptIds().next_id("first") == (0, "first"), "ids are passed later"


def test_a_fork_offers_its_own_ids_and_the_environment_is_unchanged(tmp_path: Path) -> None:
    script = (
        "import os, sys; before = dict(os.environ); from dist_wandb.lightning.launching import ScriptIds; "
        "from dist_wandb.session.inherited_rank import told; ids = ScriptIds(); ids.next_id('first'); "
        "os.fork() or (ids.next_id('of the fork'), print(told('ids', os.getpid())), sys.exit()); os.wait(); "
        "print(told('ids', os.getpid())); assert dict(os.environ) == before"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-u", "-W", "ignore", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["['', 'of the fork']", "['first']"]
    assert list(tmp_path.iterdir()) == []
