"""A process that a rank has started inherits that rank's variables, but does not hold the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from new_process import begin_new_process, forget_notes

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
    forget_notes()
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


@pytest.mark.parametrize(
    ("note", "changes"),
    [
        *((None, changes) for changes in ({"RANK": "1"}, {"WORLD_SIZE": "4"}, {"MASTER_PORT": "29501"})),
        *((text, {}) for text in ("", "[", "3", "{}")),  # damaged, or another process's
        ("none", {}),  # of a launcher, or of a script around the rank's program, which has the variables too
    ],
)
def test_ranks_that_a_rank_has_started_are_ranks(
    become_child: Callable[[], None], monkeypatch: pytest.MonkeyPatch, note: str | None, changes: dict[str, str]
) -> None:
    """Such as those of a torchrun that a rank starts."""
    if note is None:
        inherited_rank.announce()
    elif note != "none":
        inherited_rank.tell("rank", note)
    become_child()
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert inherited_rank.holder() is None
    assert identify().world_size == int(changes.get("WORLD_SIZE", "2"))


def test_the_latest_note_is_read_and_leaves_no_file(temporary: Path) -> None:
    for number in range(3):
        inherited_rank.tell("number", str(number))
    assert inherited_rank.told("number", os.getpid()) == 2
    assert inherited_rank.told("numb", os.getpid()) is None
    assert inherited_rank.told("number", 1) is None
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of another thread, which has closed it meanwhile
            names.append(descriptor.readlink().name)
    assert sum(name.startswith(f"dist-wandb-number-of-{os.getpid()}-") for name in names) == 1
    assert list(temporary.iterdir()) == []


def test_a_program_that_replaces_the_process_has_no_note() -> None:
    """As one that a launcher's script executes for the next start."""
    code = (
        "import os, sys; from dist_wandb.session.inherited_rank import tell, told; print(told('rank', os.getpid())); "
        "tell('rank', '1'); sys.stdout.flush(); sys.argv[1:] and os.execv(sys.executable, [*sys.orig_argv[:3]])"
    )
    done = subprocess.run([sys.executable, "-c", code, "again"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None"]


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
