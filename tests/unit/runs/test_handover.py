"""The parts of a run that a child process receives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from wandb.sdk.wandb_config import Config

from dist_wandb.runs import wandb_private
from dist_wandb.runs.null_run import NullRun

pytestmark = pytest.mark.usefixtures("bare_environment")


class Run:
    """A run that leaves out its config, as wandb's does."""

    def __init__(self) -> None:
        self.config: Any = Config()  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[type[Run], tuple[()]]:
        return Run, ()


def test_a_run_is_passed_with_its_config_which_wandb_leaves_out() -> None:
    run: Any = Run()
    run.config.update({"lr": 0.1, "names": {1: "a"}})
    data = wandb_private.pickled_run(run)
    assert data is not None
    received = wandb_private.unpickled_run(data)
    assert received is not None
    assert dict(received.config) == {"lr": 0.1, "names": {1: "a"}}


@pytest.mark.parametrize(
    "run",
    [None, NullRun(), mock.Mock(), SimpleNamespace(handle=lambda: None)],
    ids=["None", "NullRun", "Mock", "namespace"],
)
def test_an_object_that_is_not_a_run_or_cannot_be_pickled_is_not_passed(run: Any) -> None:
    assert wandb_private.pickled_run(run) is None
