"""What the user requests from W&B: arguments take precedence over settings, and settings over the environment."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import wandb
from opened_runs import SINGLE, opened_by

from dist_wandb.errors import ConfigurationError
from dist_wandb.runs import requested
from dist_wandb.settings.plan import plan_run

REQUESTED: list[tuple[Callable[[dict[str, Any]], str | None], str, str, str]] = [
    (requested.run_id, "id", "run_id", "WANDB_RUN_ID"),
    (partial(requested.text, name="project"), "project", "project", "WANDB_PROJECT"),
    (partial(requested.text, name="entity"), "entity", "entity", "WANDB_ENTITY"),
    (partial(requested.text, name="group"), "group", "run_group", "WANDB_RUN_GROUP"),
    (partial(requested.text, name="name"), "name", "run_name", "WANDB_NAME"),
]
BAD_ADDRESS = "http://user:hunter2@127.0.0.1:1/a b"
OF_USER = pytest.param("settings", marks=pytest.mark.newest, id="user")  # wandb 0.19 does not find it there

pytestmark = pytest.mark.usefixtures("bare_environment")


def open_offline(*, as_given: bool = True, **arguments: Any) -> None:
    opened_by(plan_run(SINGLE, "auto", "global", "exp"), SINGLE, {"mode": "offline", **arguments}, as_given=as_given)


@pytest.mark.parametrize(("read", "argument", "setting", "variable"), REQUESTED)
def test_arguments_take_precedence_over_settings_and_settings_over_the_environment(
    read: Callable[[dict[str, Any]], str | None],
    argument: str,
    setting: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read({}) is None
    monkeypatch.setenv(variable, "")
    assert read({}) is None
    monkeypatch.setenv(variable, "environment")
    assert read({}) == "environment"
    assert read({"settings": wandb.Settings()}) == "environment"
    settings: dict[str, Any] = {setting: "settings"}
    assert read({"settings": wandb.Settings(**settings)}) == "settings"
    assert read({"settings": settings}) == "settings"
    assert read({"settings": settings, argument: "argument"}) == "argument"


@pytest.mark.parametrize("name", ["fork_from", "resume_from"])
def test_a_branch_point_is_in_the_arguments_or_the_settings(name: str) -> None:
    assert requested.first_step({}) == 0
    for given in ({name: "abc?_step=5"}, {"settings": {name: "abc?_step=5.0"}}):
        assert requested.first_step(given) == 6
    settings: dict[str, Any] = {name: "abc?_step=5"}
    assert requested.first_step({"settings": wandb.Settings(**settings)}) == 6


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("online", "online"),
        ("run", "online"),
        ("offline", "offline"),
        ("dryrun", "offline"),
        ("disabled", "disabled"),
    ],
)
def test_all_names_of_wandbs_modes_are_understood(mode: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requested.mode({"mode": mode}) == expected
    monkeypatch.setenv("WANDB_MODE", mode)
    assert requested.mode({}) == expected


@pytest.mark.parametrize("kind", [dict, wandb.Settings])
def test_the_mode_in_settings_ranks_between_argument_and_environment(
    kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert requested.mode({"settings": kind(mode="offline")}) == "offline"
    assert requested.mode({"settings": kind(mode="offline"), "mode": "online"}) == "online"
    assert requested.mode({"settings": kind(entity="team")}) == "disabled"


@pytest.mark.parametrize("file", [OF_USER, pytest.param("wandb/settings", id="workspace")])
def test_the_mode_that_wandb_offline_wrote_is_respected(fresh_wandb: Path, file: str) -> None:
    settings = fresh_wandb / file
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("[default]\nmode = offline\n")
    assert requested.mode({}) == "offline"


@pytest.mark.usefixtures("fresh_wandb")
@pytest.mark.parametrize("read", [lambda: requested.init_timeout({}), lambda: requested.mode({}), open_offline])
def test_errors_about_settings_do_not_repeat_their_values(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", BAD_ADDRESS)
    with pytest.raises(ConfigurationError, match=r"W&B refuses its settings: base_url: .*Correct them") as caught:
        read()
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.usefixtures("fresh_wandb")
@pytest.mark.parametrize("as_given", [True, False])
def test_errors_about_given_settings_do_not_repeat_their_values(as_given: bool) -> None:
    with pytest.raises(ConfigurationError, match=r"W&B refuses its settings: base_url: .*Correct them") as caught:
        open_offline(as_given=as_given, settings={"base_url": BAD_ADDRESS})
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
