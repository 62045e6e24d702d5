"""What ranks are told of the arguments of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from dist_wandb.runs import job_arguments

pytestmark = pytest.mark.usefixtures("bare_environment")


def test_only_what_json_holds_is_told_to_ranks_that_were_not_given_it() -> None:
    told = job_arguments.arguments_for_others(
        {
            "project": "digits",
            "tags": ["a", "b"],
            "notes": None,
            "job_type": "",
            "mode": "offline",
            "dir": Path("logs"),
            "config": {
                "lr": 0.1,
                "model": object(),
                "bounds": (0, (1, 2)),
                "least": float("-inf"),
                "names": [{"a": ()}],
            },
            "settings": wandb.Settings(),
            "id": "exp",
        }
    )
    assert told == {
        "project": "digits",
        "tags": ["a", "b"],
        "job_type": "",
        "mode": "offline",
        "dir": "logs",
        "config": {"lr": 0.1, "bounds": [0, [1, 2]], "least": float("-inf"), "names": [{"a": []}]},
    }
    nan = {"x": float("nan"), "y": [float("nan")]}
    assert repr(job_arguments.arguments_for_others({"config": nan})) == repr({"config": nan})


@pytest.mark.parametrize("name", ["entity", "project", "name", "notes", "tags", "group", "job_type", "dir", "mode"])
def test_what_describes_the_job_is_told(name: str) -> None:
    assert job_arguments.arguments_for_others({name: "x"}) == {name: "x"}
    assert job_arguments.arguments_for_others({name: None}) == {}
