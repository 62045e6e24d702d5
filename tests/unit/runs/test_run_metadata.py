"""Location, address and metadata of a run, and the arguments that other ranks receive."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wandb
from fakes import FakeWandb
from opened_runs import FIRST, opened, opened_by
from wandb.sdk.wandb_config import Config

from dist_wandb.runs import run_metadata, wandb_private
from dist_wandb.runs.null_run import NullRun
from dist_wandb.settings.plan import plan_run

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("wandb_mode", "expected"),
    [
        ("online", "https://wandb.example/team/digits/runs/exp"),
        ("offline", "offline, in {directory}"),
        ("disabled", "nowhere, because W&B is disabled"),
    ],
)
def test_the_location_of_a_run(fake_wandb: FakeWandb, wandb_mode: str, expected: str) -> None:
    run = opened(FIRST, "auto", {"mode": wandb_mode})
    assert run_metadata.location(run) == expected.format(directory=Path(fake_wandb.runs[0].dir).parent)


def test_the_location_of_an_offline_shared_run_is_the_directory_of_all_ranks(
    fake_wandb: FakeWandb, tmp_path: Path
) -> None:
    plan = plan_run(FIRST, "shared", "global", "exp")
    run: Any = opened_by(plan, FIRST, {"mode": "offline"})
    run.dir = str(tmp_path / "wandb/rank-0/wandb/offline-run-1-exp/files")  # as wandb lays them out
    assert run_metadata.location(run, plan) == f"offline, a file for each rank below {tmp_path / 'wandb'}"
    assert run_metadata.location(run) == f"offline, in {tmp_path / 'wandb/rank-0/wandb/offline-run-1-exp'}"
    assert len(fake_wandb.runs) == 1


def test_the_page_of_a_group_belongs_to_its_project(fake_wandb: FakeWandb) -> None:
    opened(FIRST, "new", {})
    run: Any = fake_wandb.runs[0]
    assert run_metadata.group_url(run, "night #1/a") == "https://wandb.example/team/digits/groups/night%20%231%2Fa"


def test_without_group_run_or_address_a_group_has_no_page(fake_wandb: FakeWandb) -> None:
    assert run_metadata.group_url(opened(FIRST, "auto", {}), None) is None
    assert run_metadata.group_url(opened(FIRST, "auto", {"mode": "offline"}), "night") is None
    assert run_metadata.group_url(NullRun(), "night") is None
    assert len(fake_wandb.runs) == 2


def test_without_an_imported_wandb_no_run_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))  # another thread is importing it
    assert run_metadata.running_run() is None
    monkeypatch.delitem(sys.modules, "wandb")
    assert run_metadata.running_run() is None
    assert "wandb" not in sys.modules


def test_only_values_that_json_can_hold_are_published() -> None:
    config = {"lr": 0.1, "bounds": (0, (1, 2)), "least": float("-inf"), "names": [{"a": ()}], "model": object()}
    kept = {"project": "digits", "tags": ["a", "b"], "job_type": "", "mode": "offline"}
    others = {"notes": None, "settings": wandb.Settings(), "id": "exp"}
    published = run_metadata.arguments_for_others({**kept, **others, "dir": Path("logs"), "config": config})
    assert json.loads(json.dumps(published)) == {
        **kept,
        "dir": "logs",
        "config": {"lr": 0.1, "bounds": [0, [1, 2]], "least": float("-inf"), "names": [{"a": []}]},
    }
    nan = {"x": float("nan"), "y": [float("nan")]}
    assert repr(run_metadata.arguments_for_others({"config": nan})) == repr({"config": nan})


# --- the parts of a run that a child process receives -----------------------------------------------------------------


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
    [None, NullRun(), mock.Mock(), types.SimpleNamespace(handle=lambda: None)],
    ids=["None", "NullRun", "Mock", "namespace"],
)
def test_an_object_that_is_not_a_run_or_cannot_be_pickled_is_not_passed(run: Any) -> None:
    assert wandb_private.pickled_run(run) is None
