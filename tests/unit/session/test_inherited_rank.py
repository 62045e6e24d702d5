"""A process that a rank has started inherits that rank's variables, but does not hold the rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from new_process import begin_new_process
from strangers import give_away

import dist_wandb
from dist_wandb.job import launch
from dist_wandb.job.topology import Topology
from dist_wandb.session import inherited_rank
from dist_wandb.session.opener import identify

VARIABLES = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _rank(
    bare_environment: None,  # noqa: ARG001  # used for its effect
    temporary: Path,  # noqa: ARG001  # used for its effect
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begin as rank 0 of 2."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    begin_new_process(monkeypatch)


@pytest.fixture
def become_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Continue as a grandchild of this process that has executed another program."""

    def become() -> None:
        monkeypatch.setattr(inherited_rank, "ancestors", lambda: iter([os.getppid(), os.getpid()]))
        begin_new_process(monkeypatch)

    return become


def test_a_process_that_a_rank_has_started_is_a_job_of_its_own(
    become_child: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    inherited_rank.announce()
    assert identify() == Topology(0, 0, None, 2, None, None)
    become_child()
    assert inherited_rank.holder() == os.getpid()
    assert identify() == Topology.single()
    assert capsys.readouterr().err.count("which holds the rank whose variables") == 1


@pytest.mark.parametrize("changes", [{"RANK": "1"}, {"WORLD_SIZE": "4"}, {"MASTER_PORT": "29501"}])
def test_ranks_that_a_rank_has_started_are_ranks(
    become_child: Callable[[], None], monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """Such as those of a torchrun that a rank starts."""
    inherited_rank.announce()
    become_child()
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert inherited_rank.holder() is None


def test_a_rank_whose_parent_has_announced_nothing_is_that_rank(become_child: Callable[[], None]) -> None:
    """A launcher, or a script around the rank's program, has the variables too."""
    become_child()
    assert identify().world_size == 2


OF_AN_EARLIER_PROCESS = json.dumps([-1, VARIABLES])  # with the same id


@pytest.mark.parametrize("content", ["", "[", "3", "[1, 2, 3]", "{}", OF_AN_EARLIER_PROCESS, None])
def test_a_file_that_is_damaged_or_of_another_process_or_user_is_ignored(
    become_child: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    inherited_rank.announce()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o077 == 0
    assert json.loads(file.read_text())[1] == VARIABLES
    if content is None:
        give_away(file, monkeypatch)
    else:
        file.write_text(content)
    become_child()
    assert inherited_rank.holder() is None


def test_a_fork_of_a_rank_is_a_job_of_its_own_also_without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of the rank's process group, which it cannot use."""
    for name in VARIABLES:
        monkeypatch.delenv(name)
    inherited_rank.announce()
    assert inherited_rank.holder() is None
    rank = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: rank + 1)
    group = mock.patch.object(Topology, "from_torch_distributed", return_value=Topology(1, 1, None, 2, None, None))
    with group, mock.patch("wandb.agent") as agent:
        assert (identify(), inherited_rank.holder()) == (Topology.single(), rank)
        dist_wandb.agent("s1")
    agent.assert_called_once()


def test_ancestors_begin_with_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(launch.ancestors()) == os.getppid()
    monkeypatch.setattr(launch, "Path", lambda _: Path("/nowhere"))
    assert list(launch.ancestors()) == [os.getppid()]
    assert launch.started_at(os.getpid()) is None


def test_the_file_is_removed_at_exit(tmp_path: Path) -> None:
    code = "from dist_wandb.session import inherited_rank; inherited_rank.announce(); import glob, sys; "
    code += "print(len(glob.glob(sys.argv[1] + '/dist-wandb-rank-*')))"
    environment: dict[str, Any] = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert list(tmp_path.glob("dist-wandb-rank-*")) == []


def test_files_of_killed_processes_are_deleted_by_the_next_one(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])  # noqa: S607  # of the system
    ended.wait()
    names = [inherited_rank.file_of(*one).name for one in ((ended.pid,), (ended.pid, ""), (os.getppid(),), ("x",))]
    for name in (*names, f"dist-wandb-rank-of-another-{ended.pid}.json"):
        (tmp_path / name).touch()
    inherited_rank.announce()
    left = {path.name for path in tmp_path.iterdir()} - {inherited_rank.file_of(os.getpid()).name}
    assert left == {*names[2:], f"dist-wandb-rank-of-another-{ended.pid}.json"}
