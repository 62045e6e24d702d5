"""The arguments of a rank that are published for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wandb

from dist_wandb.runs import run_metadata

pytestmark = pytest.mark.usefixtures("bare_environment")


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
