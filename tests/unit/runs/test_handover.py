"""The parts of a run that a child process receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dist_wandb.runs import wandb_private
from dist_wandb.runs.null_run import NullRun

pytestmark = pytest.mark.usefixtures("bare_environment")


def test_a_run_is_passed_as_a_pickle() -> None:
    run: Any = SimpleNamespace(id="exp")
    data = wandb_private.pickled_run(run)
    assert data is not None
    assert wandb_private.unpickled_run(data) == run


def test_a_run_is_passed_with_its_config_which_wandb_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(config={"lr": 0.1, "names": {1: "a"}})
    data = wandb_private.pickled_run(run)
    filled: list[object] = []
    monkeypatch.setattr(wandb_private, "fill_config", lambda _, values: filled.append(values))
    assert data is not None
    assert wandb_private.unpickled_run(data)
    assert filled == [{"lr": 0.1, "names": {1: "a"}}]


@pytest.mark.parametrize(
    "run",
    [None, NullRun(), mock.Mock(), SimpleNamespace(handle=lambda: None)],
    ids=["None", "NullRun", "Mock", "namespace"],
)
def test_an_object_that_is_not_a_run_or_cannot_be_pickled_is_not_passed(run: Any) -> None:
    assert wandb_private.pickled_run(run) is None
