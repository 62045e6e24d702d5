"""The stand-in for a run accepts every use of a run."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from wandb.sdk.wandb_run import Run

from dist_wandb.payloads.devices import HostCopy, Later
from dist_wandb.runs.null_run import NullPart, NullRun
from dist_wandb.runs.summary import Statistics

USES: list[Callable[[Any], Any]] = [
    *(lambda part: part > 0, lambda part: part >= 0, lambda part: part < 0, lambda part: part <= 0),
    *(lambda part: 5 < part, lambda part: part == 0, lambda part: part == "done"),  # noqa: SIM300  # the other order
    lambda part: int(part) > 0,
    lambda part: float(part) > 0,
]

pytestmark = pytest.mark.usefixtures("bare_environment")


def test_a_null_run_accepts_every_use_at_any_depth() -> None:
    run = NullRun()
    run.log({"loss": 1})
    run.config.update({"lr": 0.1}, allow_val_change=True)
    run.summary["best"] = 0.9
    run.summary["other"].deeper.still["yes"](1, two=2)
    run.name = "renamed"
    del run.config["lr"]
    run.alert("title", text="text").anything()
    with run as inside, run.a.b("c") as deeper:
        assert inside is run
        assert not deeper


def test_the_summary_of_a_null_run_returns_written_values_and_defaults() -> None:
    run: Any = NullRun()
    assert run.summary.get("best", 0) == 0
    assert run.summary.get("best") is None
    assert "best" not in run.summary
    assert run.summary.get("best", 0) < 0.5
    run.summary["best"] = 0.5
    run.summary.update({"epoch": 3}, note="a")
    run.summary.top = 1
    assert (run.summary["best"], run.summary.get("best", 0), run.summary.epoch, run.summary.top) == (0.5, 0.5, 3, 1)
    assert ("best" in run.summary, len(run.summary), list(run.summary)) == (True, 4, ["best", "epoch", "note", "top"])
    assert dict(run.summary.items()) == dict(run.summary) == {"best": 0.5, "epoch": 3, "note": "a", "top": 1}
    del run.summary["best"]
    del run.summary["best"]
    assert not run.summary["best"]
    assert copy.deepcopy(run).summary["epoch"] == pickle.loads(pickle.dumps(run)).summary["epoch"] == 3  # noqa: S301


def test_lists_that_were_logged_are_read_back() -> None:
    """As W&B stores them: arrays of up to 32 numbers are lists, too."""
    run: Any = NullRun()
    run.summary.show({"iou": 0.5}, {}, {})
    values = {"iou": [0.5, 1], "pair": (1, "a"), "array": np.arange(3), "tensor": torch.ones(2), "long": np.ones(33)}
    run.summary.show(values, {}, {})
    assert dict(run.summary) == {"iou": [0.5, 1], "pair": [1, "a"], "array": [0, 1, 2], "tensor": [1.0, 1.0]}


def test_written_values_read_as_wandb_stores_them_whatever_the_script_changes_later() -> None:
    run: Any = NullRun()
    values: dict[str, Any] = {
        "list": [1],
        "nested": {"best": 1},
        "tensor": torch.ones(()),
        "pair": (np.float32(0.5), torch.ones(2)),
    }
    run.summary.update(values)
    values["list"].append(2)
    values["nested"]["best"] = 2
    values["tensor"].add_(1)
    stored = {"list": [1], "nested": {"best": 1}, "tensor": 1.0, "pair": [0.5, [1.0, 1.0]]}
    assert dict(run.summary) == stored
    assert type(run.summary["tensor"]) is float


def test_a_mapping_within_the_summary_of_a_null_run_is_used_as_wandbs() -> None:
    run: Any = NullRun()
    run.summary["best"] = {"epoch": 1, "at": {"step": 1}}
    run.summary.best.epoch = 2
    run.summary["best"].update({"at": {"step": run.summary.best.at.step + 2}})
    assert run.summary["best"] == pickle.loads(pickle.dumps(run.summary["best"])) == {"epoch": 2, "at": {"step": 3}}  # noqa: S301
    assert json.dumps(methodcaller("_as_dict")(run.summary)) == '{"best": {"epoch": 2, "at": {"step": 3}}}'


def test_numbers_that_a_summary_combines_are_known_for_a_null_run_although_a_device_is_late() -> None:
    number = HostCopy(torch.tensor([0.75]))
    statistics = Statistics(("max", "mean", "first"))
    for value in (0.5, *[Later(number, 0)] * 70, "text"):
        statistics.add(value)
    largest = NullRun()
    largest.summary.show({}, {}, {"top": statistics})
    assert (largest.summary["top"]["first"], largest.summary["top"]["max"]) == (0.5, 0.75)
    statistics.add(math.nan)
    statistics.shown = ("last", "max")
    assert all(map(math.isnan, statistics.value().values()))


class Impatient(NullRun):
    READ_AS_SET = 0.0


def test_what_a_rank_sets_of_a_null_run_is_read_until_the_primary_may_have_changed_it() -> None:
    run: Any = NullRun()
    published = {"name": "night", "tags": ("a",)}
    run.show_metadata(lambda: published, "exp")
    run.tags += ("b",)
    run.name = "day"
    assert (run.name, run.tags) == ("day", ("a", "b"))
    published["name"] = "dawn"
    assert (run.name, run.tags, run.id) == ("dawn", ("a", "b"), "exp")
    late: Any = Impatient()
    late.show_metadata(lambda: published, "exp")
    late.name = "mine"
    assert late.name == "dawn"


def test_the_settings_of_a_null_run_are_those_of_the_run_as_far_as_its_metadata_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts copy files to, or join paths with, what they read: with a stand-in this is a TypeError."""
    run: Any = NullRun()
    assert run.settings.mode == "online"  # as it would be without an argument
    published = {"name": "night", "project": "p", "entity": "", "offline": True, "disabled": False}
    run.show_metadata(lambda: {**published, "dir": "/d/wandb/offline-run-1-exp/files"}, "exp")
    found = run.settings
    assert (found.run_id, found.run_name, found.project, found.mode) == (
        "exp",
        "night",
        "p",
        "offline",
    )
    assert (found.wandb_dir, found.sync_dir) == ("/d/wandb", "/d/wandb/offline-run-1-exp")
    assert found.files_dir == "/d/wandb/offline-run-1-exp/files"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert (run.settings.root_dir, run.settings.base_url) == ("/d", "https://wandb.example")  # of this process
    assert run.settings.log_user == "/d/wandb/offline-run-1-exp/logs/debug.log"
    assert run.settings.program
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "never")  # wandb refuses it
    assert run.settings.sync_dir == "/d/wandb/offline-run-1-exp"
    assert not run.settings.console
    monkeypatch.delenv("WANDB_INIT_TIMEOUT")
    older_names = attrgetter("_settings.mode", "_settings._offline")
    assert older_names(run) == ("offline", True)
    published["offline"] = False
    assert older_names(run) == ("online", False)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("use", USES)
def test_an_unknown_value_compares_as_nan_with_one_warning(
    use: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    run: Any = NullRun()
    for _ in range(3):
        assert not use(run.summary["best"])
    (message,) = [found.getMessage() for found in caplog.records]
    assert "on a rank without a run" in message
    assert "run.summary.get(name, 0)" in message


def test_an_unknown_value_can_be_formatted_but_not_calculated_with() -> None:
    part: Any = NullRun().height
    with pytest.raises(TypeError, match="unsupported operand"):
        _ = part + 1
    assert f"{part:.3f} {part} {part:d} {part:>5}" == "nan NullRun() NullRun()   nan"
    assert hash(part) == hash(part)
    assert part != NullPart()
    assert (part.get("a", 1), list(part.keys()), list(part.values()), list(part.items())) == (1, [], [], [])
    assert not part.get("a").deeper


def test_a_null_run_lists_the_public_names_of_a_run() -> None:
    names = dir(NullRun())
    assert {"log", "summary", "config", "finish", "watch", "name", "url"} <= set(names)
    assert not [name for name in names if name.startswith("_") or name in ("show", "show_metadata", "metadata")]


@pytest.mark.parametrize("name", ["__getstate_extra__", "__array__", "__len_hint__", "__fspath__"])
def test_a_null_run_does_not_pretend_to_implement_protocols(name: str) -> None:
    assert not hasattr(NullRun(), name)


@pytest.mark.parametrize("name", [name for name in dir(Run) if not name.startswith("_")])
def test_a_null_run_has_all_attributes_of_a_run(name: str) -> None:
    assert not getattr(NullRun(), name)


def test_a_null_run_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), NullRun():
        raise KeyError
