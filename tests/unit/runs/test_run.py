"""What is handed to wandb for a plan, and what is written of a row. Nothing of wandb is started but where said."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import wandb
from hypothesis import assume, given
from hypothesis import strategies as st
from wandb.sdk.wandb_run import Run  # `wandb.Run` is newer than the oldest version

from dist_wandb.errors import ConfigurationError
from dist_wandb.runs import (
    argument_checks,
    axes,
    console,
    finishing,
    handover,
    job_arguments,
    null_run,
    requested,
    run_metadata,
    upload_environment,
)
from dist_wandb.runs.argument_checks import check_id, check_init_arguments
from dist_wandb.runs.null_run import NullPart, NullRun
from dist_wandb.runs.requested import wanted_mode
from dist_wandb.runs.wandb_init import open_run
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import RunPlan, plan_run
from dist_wandb.topology.model import Topology
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME

if TYPE_CHECKING:
    from tests.conftest import FakeWandb

FORBIDDEN = ":;,#?/'\\%"
FIRST, SECOND = Topology(0, 0, 0, 2, 2, 1), Topology(1, 1, 0, 2, 2, 1)
SINGLE = Topology.single()
ALL_PLANS = [(mode, scope) for mode in ("auto", "shared", "new") for scope in ("global", "worker")]

pytestmark = pytest.mark.usefixtures("bare_environment")


def opened(topology: Topology, mode: str, arguments: dict[str, Any], *, group: str | None = None) -> Any:
    return open_run(plan_run(topology, mode, "global", "exp", group=group), topology, arguments)


# --- arguments of wandb.init ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("projct", "Did you mean 'project'?"),
        ("tag", "Did you mean 'tags'?"),
        ("runmode", "Did you mean 'run_mode'?"),
        ("rankscope", "Did you mean 'rank_scope'?"),
        ("zzzzzz", "See the documentation of wandb.init."),
    ],
)
def test_an_argument_that_wandb_does_not_know_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_init_arguments({"project": "digits", name: 1}, "the door")
    assert str(refused.value) == f"the door got the argument {name!r}, which wandb.init does not know. {hint}"


@pytest.mark.parametrize("name", ["run_mode", "rank_scope", "reduce", "spread", "join_timeout"])
def test_our_own_arguments_in_the_wrong_place_are_sent_to_the_right_one(name: str) -> None:
    message = f"init_trackers got the argument '{name}', which is dist_wandb's own, not one of wandb.init. Give it to"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_init_arguments({name: "new"}, "init_trackers")


def test_every_argument_of_the_installed_wandb_is_taken() -> None:
    check_init_arguments(dict.fromkeys(inspect.signature(wandb.init).parameters), "the door")


def test_every_argument_said_to_be_known_is_known_to_the_installed_wandb() -> None:
    assert set(inspect.signature(wandb.init).parameters) >= argument_checks._COMMON_INIT_ARGUMENTS


def test_a_wandb_that_takes_any_argument_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "init", lambda **_: None)
    check_init_arguments({"projct": 1}, "the door")


def test_wandbs_own_shared_mode_is_refused_with_ours() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("the door was given mode='shared'")) as refused:
        check_init_arguments({"mode": "shared"}, "the door")
    assert "Pass run_mode='shared'" in str(refused.value)


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("character", FORBIDDEN)
def test_a_forbidden_character_is_named_and_an_id_without_it_proposed(character: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_id(f"a{character}b", "id=…")
    expected = f"id=… has {character!r}, which W&B refuses in run ids. Use for example 'a-b'."
    assert str(refused.value) == expected


def test_all_forbidden_characters_are_named_at_once() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("has ':' and '/', which W&B refuses")):
        check_id("a:b/c", "id=…")


@pytest.mark.parametrize("run_id", ["", " ", " a", "a ", "a\n", "\ta"])
def test_an_empty_id_and_white_space_around_one_are_refused(run_id: str) -> None:
    with pytest.raises(ConfigurationError, match="is empty, or has white space around it"):
        check_id(run_id, "id=…")


@pytest.mark.parametrize("run_id", [7, True, b"a", Path("a")])
def test_an_id_that_is_no_text_is_refused(run_id: object) -> None:
    with pytest.raises(ConfigurationError, match=f"id=… is {type(run_id).__name__}, but a run id is text"):
        check_id(run_id, "id=…")


@pytest.mark.parametrize("character", ["\x1b", "\0", "\x9b", "\u202e", "\ud800", "\n"])
def test_a_character_that_cannot_be_printed_is_refused_and_not_shown(character: str) -> None:
    run_id = f"a{character}b"
    with pytest.raises(ConfigurationError, match="which cannot be printed") as refused:
        check_id(run_id, f"id={run_id!r}")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("run_id", "size"), [("x" * 129, "129"), ("é" * 97, r"97 characters \(194 bytes"), ("x" * 5000, "5000")]
)
def test_an_id_too_long_for_the_names_of_files_is_refused(run_id: str, size: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{size}.*a run id may have 128") as refused:
        check_id(run_id, f"id={run_id!r}")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("run_id", [".", ".."])
def test_an_id_that_names_a_directory_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigurationError, match="names a directory"):
        check_id(run_id, "id=…")


def test_the_longest_ids_are_taken() -> None:
    for run_id in ("x" * 128, "é" * 96):
        assert check_id(run_id, "id=…") == run_id


@given(st.text(st.characters(exclude_characters=FORBIDDEN, exclude_categories=["Z", "C"]), min_size=1, max_size=48))
def test_every_other_id_is_taken_as_it_is(run_id: str) -> None:
    assume(run_id not in (".", ".."))
    assert check_id(run_id, "id=…") == run_id


@pytest.mark.newest  # wandb 0.19 takes any id, and its server refuses it
@pytest.mark.parametrize("run_id", ["", " a", *(f"a{character}b" for character in ":;,#?/'")])
def test_what_wandb_refuses_is_refused_before_wandb_does(run_id: str) -> None:
    with pytest.raises(wandb.errors.UsageError, match="Run ID cannot"):
        wandb.Settings(run_id=run_id)
    with pytest.raises(ConfigurationError):
        check_id(run_id, "id=…")


@pytest.mark.parametrize(
    ("arguments", "variable", "origin"),
    [
        ({"id": "a:b"}, None, "id='a:b'"),
        ({"settings": {"run_id": "a:b"}}, None, "id='a:b'"),
        ({"settings": {"run_id": ""}}, None, "id=''"),
        ({}, "a:b", "WANDB_RUN_ID='a:b'"),
        ({}, " a", "WANDB_RUN_ID=' a'"),
    ],
    ids=["argument", "settings", "empty in settings", "WANDB_RUN_ID", "white space in WANDB_RUN_ID"],
)
def test_a_refused_id_is_named_with_its_origin(
    arguments: dict[str, Any], variable: str | None, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("WANDB_RUN_ID", variable)
    with pytest.raises(ConfigurationError, match=re.escape(origin)):
        requested.wanted_id(arguments)


@pytest.mark.parametrize("given_id", ["", "a:b", 7])
def test_an_id_given_to_a_door_is_refused_there(given_id: object) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"id={given_id!r} given to the door ")):
        check_init_arguments({"id": given_id}, "the door")


WANTED: list[tuple[Callable[[dict[str, Any]], str | None], str, str, str]] = [
    (requested.wanted_id, "id", "run_id", "WANDB_RUN_ID"),
    (requested.wanted_group, "group", "run_group", "WANDB_RUN_GROUP"),
    (requested.wanted_name, "name", "run_name", "WANDB_NAME"),
]


@pytest.mark.parametrize(("wanted", "argument", "setting", "variable"), WANTED)
def test_the_argument_wins_over_the_settings_and_those_over_the_environment(
    wanted: Callable[[dict[str, Any]], str | None],
    argument: str,
    setting: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert wanted({}) is None
    monkeypatch.setenv(variable, "")
    assert wanted({}) is None
    monkeypatch.setenv(variable, "environment")
    assert wanted({}) == "environment"
    assert wanted({"settings": wandb.Settings()}) == "environment"
    settings: dict[str, Any] = {setting: "settings"}
    assert wanted({"settings": wandb.Settings(**settings)}) == "settings"
    assert wanted({"settings": settings}) == "settings"
    assert wanted({"settings": settings, argument: "argument"}) == "argument"


# --- the wanted W&B mode ----------------------------------------------------------------------------------------------


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
def test_wandbs_modes_are_understood_in_all_their_names(
    mode: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wanted_mode({"mode": mode}) == expected
    monkeypatch.setenv("WANDB_MODE", mode)
    assert wanted_mode({}) == expected


@pytest.mark.parametrize("settings", [{"mode": "offline"}, wandb.Settings(mode="offline")], ids=["dict", "Settings"])
def test_the_mode_of_the_settings_wins_over_the_environment_and_loses_to_the_argument(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wanted_mode({"settings": settings}) == "offline"
    assert wanted_mode({"settings": settings, "mode": "online"}) == "online"


@pytest.mark.parametrize("settings", [{"entity": "team"}, wandb.Settings(entity="team")], ids=["dict", "Settings"])
def test_settings_that_say_nothing_of_the_mode_leave_it_to_the_environment(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wanted_mode({"settings": settings}) == "offline"


def test_an_empty_wandb_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "")
    with pytest.raises(ConfigurationError, match="WANDB_MODE is set but empty, which W&B refuses"):
        wanted_mode({})


def test_an_unknown_mode_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigurationError, match=r"The W&B mode 'ofline' is unknown\. .* Did you mean 'offline'\?"):
        wanted_mode({})


@pytest.fixture
def fresh_wandb(bare_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # noqa: ARG001  # goes first
    """A real wandb that has not read its settings files yet; the directory of its files is given."""
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield tmp_path
    wandb.teardown()


@pytest.mark.parametrize("said", ["nothing", "in settings", "in the environment"])
@pytest.mark.parametrize("topology", [FIRST, SECOND], ids=["primary", "secondary"])
def test_of_a_shared_run_on_disk_wandb_prints_what_helps(
    fresh_wandb: Path, topology: Topology, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_SILENT")
    arguments: dict[str, Any] = {"mode": "offline", "dir": str(fresh_wandb)}
    if said == "in settings":
        arguments["settings"] = wandb.Settings(quiet=False)
    elif said == "in the environment":
        monkeypatch.setenv("WANDB_QUIET", "false")
    plan = plan_run(topology, "shared", "global", "exp")
    run = open_run(plan, topology, arguments)
    run.log({"loss": 0.5})
    opening = capfd.readouterr().err
    with finishing.quiet_end(run, plan, arguments):
        wandb.termwarn("a warning")
        run.finish()
    ending = capfd.readouterr().err
    wandb.termlog("information")
    assert "information" in capfd.readouterr().err
    assert "a warning" in ending
    assert ("wandb sync" in ending, "Run history" in ending) == (said != "nothing",) * 2
    assert ("offline" in opening) == (said != "nothing" or topology is FIRST)
    line = finishing.how_to_upload(run, plan, topology)
    if topology is FIRST:
        assert line is not None
        assert line.startswith("dist_wandb: the run exp is on disk, in several files. Upload it with: dist-wandb sync ")
        assert line.endswith(f" {fresh_wandb}/wandb")
    else:
        assert line is None


@pytest.mark.usefixtures("fake_wandb")
def test_only_of_runs_in_several_files_it_is_said_how_to_upload_them() -> None:
    def line(run_mode: Any, topology: Topology = FIRST, **arguments: Any) -> str | None:
        plan = plan_run(topology, run_mode, "global", "exp")
        return finishing.how_to_upload(open_run(plan, topology, arguments), plan, topology)

    assert line("shared", mode="offline") is not None
    assert line("shared") is None  # it is at the server
    assert line("shared", mode="disabled") is None
    assert line("auto", mode="offline") is None  # W&B's own line is right
    assert line("new", mode="offline") is None
    assert line("shared", SINGLE, mode="offline") is None
    assert line("shared", SECOND, mode="offline") is None  # its primary says it


OF_USER = pytest.param("settings", marks=pytest.mark.newest, id="user")  # wandb 0.19 does not find it there


@pytest.mark.parametrize("file", [OF_USER, pytest.param("wandb/settings", id="workspace")])
def test_the_mode_that_wandb_offline_wrote_is_respected(fresh_wandb: Path, file: str) -> None:
    settings = fresh_wandb / file
    settings.parent.mkdir(exist_ok=True)
    settings.write_text("[default]\nmode = offline\n")
    assert wanted_mode({}) == "offline"


@pytest.mark.usefixtures("fresh_wandb")
def test_without_any_wish_wandb_is_online() -> None:
    assert wanted_mode({}) == "online"


# --- opening a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "scope"), ALL_PLANS)
def test_in_a_world_of_one_wandb_gets_exactly_what_the_user_gave(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str, scope: str
) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "night")
    given_arguments = {"project": "digits", "name": "base", "dir": "logs", "mode": "online", "tags": ("a",)}
    plan = plan_run(SINGLE, mode, scope, None, group="night")
    run: Any = open_run(plan, SINGLE, given_arguments)
    assert run is fake_wandb.runs[0]
    assert fake_wandb.arguments == [given_arguments]
    assert not list(fake_wandb.directory.rglob(SIDECAR_NAME))


def test_a_rank_that_opens_no_run_does_not_call_wandb(fake_wandb: FakeWandb) -> None:
    assert isinstance(opened(SECOND, "auto", {"project": "digits"}), NullRun)
    assert fake_wandb.arguments == []


def test_auto_gives_the_run_the_planned_id_and_nothing_else(fake_wandb: FakeWandb) -> None:
    opened(FIRST, "auto", {"project": "digits", "name": "base", "dir": "logs"})
    assert fake_wandb.arguments == [{"project": "digits", "name": "base", "dir": "logs", "id": "exp"}]


@pytest.mark.parametrize(("topology", "number"), [(FIRST, 0), (SECOND, 1)])
def test_new_gives_every_rank_an_id_a_group_a_name_and_a_directory_of_its_own(
    fake_wandb: FakeWandb, tmp_path: Path, topology: Topology, number: int
) -> None:
    opened(topology, "new", {"project": "digits", "name": "base", "dir": str(tmp_path / "logs")})
    directory = tmp_path / "logs" / "wandb" / f"rank-{number}"
    assert fake_wandb.arguments == [
        {
            "project": "digits",
            "id": f"exp-rank-{number}",
            "group": "exp",
            "name": f"base-rank-{number}",
            "dir": str(directory),
        }
    ]
    assert directory.is_dir()


@pytest.mark.parametrize(("topology", "number"), [(FIRST, 0), (SECOND, 1)])
def test_shared_switches_wandbs_shared_mode_on_for_every_rank(
    fake_wandb: FakeWandb, topology: Topology, number: int
) -> None:
    opened(topology, "shared", {"project": "digits", "name": "base", "mode": "online"})
    (arguments,) = fake_wandb.arguments
    settings = arguments.pop("settings")
    assert arguments == {
        "project": "digits",
        "id": "exp",
        "name": "base",
        "mode": None,
        "dir": str(Path("wandb") / f"rank-{number}"),
    }
    assert (settings.mode, settings.x_label) == ("shared", f"rank-{number}")
    assert (settings.x_primary, settings.x_update_finish_state) == (number == 0, number == 0)


@pytest.mark.parametrize("mode", ["new", "shared"])
def test_a_name_from_the_environment_gets_its_suffix_too(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_NAME", "base")
    node = Topology(2, 0, 1, 4, 2, 2)
    open_run(plan_run(node, mode, "worker", "exp"), node, {})
    assert fake_wandb.arguments[0]["name"] == ("base-worker-1" if mode == "shared" else "base-worker-1-rank-0")


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_without_a_name_wandb_may_make_one(fake_wandb: FakeWandb, mode: str) -> None:
    opened(FIRST, mode, {})
    assert "name" not in fake_wandb.arguments[0]


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_the_users_group_is_given_to_every_run(fake_wandb: FakeWandb, mode: str) -> None:
    opened(FIRST, mode, {}, group="night")
    assert fake_wandb.arguments[0]["group"] == "night"


@pytest.mark.parametrize(
    ("arguments", "variable", "root"),
    [
        ({}, None, "."),
        ({}, "from-env", "from-env"),
        ({"settings": {"root_dir": "from-settings"}}, "from-env", "from-settings"),
        ({"settings": {"root_dir": "from-settings"}, "dir": "argument"}, "from-env", "argument"),
        ({"dir": Path("argument")}, None, "argument"),
    ],
)
def test_the_directory_of_a_rank_lies_below_the_users(
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    variable: str | None,
    root: str,
) -> None:
    if variable is not None:
        monkeypatch.setenv("WANDB_DIR", variable)
    opened(SECOND, "new", arguments)
    assert fake_wandb.arguments[0]["dir"] == str(Path(root) / "wandb" / "rank-1")


@pytest.mark.parametrize("rank_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("wandb_mode", ["offline", "disabled", "dryrun"])
@pytest.mark.parametrize("where", ["argument", "settings", "environment", "wandb offline"])
def test_offline_and_disabled_stay_so_in_every_run_mode(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, rank_mode: str, wandb_mode: str, where: str
) -> None:
    arguments: dict[str, Any] = {}
    if where == "argument":
        arguments["mode"] = wandb_mode
    elif where == "settings":
        arguments["settings"] = wandb.Settings(mode=wandb_mode)  # type: ignore[arg-type]  # parametrised
    elif where == "environment":
        monkeypatch.setenv("WANDB_MODE", wandb_mode)
    else:
        fake_wandb.stored_mode = wandb_mode
    before = copy.copy(arguments)
    opened(FIRST, rank_mode, arguments)
    (told,) = fake_wandb.arguments
    assert told.get("mode") == before.get("mode")
    if rank_mode == "shared" and wandb_mode != "disabled":  # system metrics get their label when they are taken
        assert set_by_user(told["settings"]) == {**set_by_user(before.get("settings")), "x_label": "rank-0"}
        assert "x_label" not in set_by_user(before.get("settings"))
    else:
        assert told.get("settings") == before.get("settings")


def set_by_user(settings: wandb.Settings | None) -> dict[str, Any]:
    return {} if settings is None else {name: getattr(settings, name) for name in settings.model_fields_set}


@pytest.mark.parametrize("rank_mode", ["auto", "shared", "new"])
@pytest.mark.parametrize("where", ["argument", "environment"])
def test_a_disabled_run_makes_no_directory(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, rank_mode: str, where: str
) -> None:
    arguments = {"dir": "logs"}
    if where == "argument":
        arguments["mode"] = "disabled"
    else:
        monkeypatch.setenv("WANDB_MODE", "disabled")
    opened(FIRST, rank_mode, arguments)
    assert fake_wandb.arguments[0]["dir"] == "logs"
    assert not Path("logs").exists()


@pytest.mark.parametrize("topology", [SINGLE, FIRST], ids=["world of one", "two ranks"])
def test_the_users_directory_is_made(fake_wandb: FakeWandb, topology: Topology) -> None:
    opened(topology, "auto", {"dir": Path("a/b")})
    assert fake_wandb.arguments[0]["dir"] == Path("a/b")
    assert Path("a/b").is_dir()


def test_a_directory_that_cannot_be_made_is_left_to_wandb(fake_wandb: FakeWandb) -> None:
    Path("file").touch()
    opened(SINGLE, "auto", {"dir": "file/logs"})
    assert fake_wandb.arguments == [{"dir": "file/logs"}]


def test_the_users_settings_object_is_copied_and_keeps_what_it_was(fake_wandb: FakeWandb) -> None:
    settings = wandb.Settings(entity="team", x_label="mine")
    before, fields_before = settings.model_dump(), set(settings.model_fields_set)
    opened(SECOND, "shared", {"settings": settings})
    told = fake_wandb.arguments[0]["settings"]
    assert told is not settings
    assert (told.entity, told.mode, told.x_label) == ("team", "shared", "rank-1")
    assert settings.model_dump() == before
    assert settings.model_fields_set == fields_before


def test_settings_given_as_a_mapping_are_kept_and_not_changed(fake_wandb: FakeWandb) -> None:
    settings = {"entity": "team"}
    opened(SECOND, "shared", {"settings": settings})
    told = fake_wandb.arguments[0]["settings"]
    assert (told.entity, told.mode) == ("team", "shared")
    assert settings == {"entity": "team"}


@pytest.mark.parametrize("mode", ["auto", "shared", "new"])
def test_the_users_arguments_are_not_changed(fake_wandb: FakeWandb, mode: str) -> None:
    arguments: dict[str, Any] = {"project": "digits", "config": {"lr": 0.1}, "mode": "online"}
    opened(FIRST, mode, arguments)
    assert arguments == {"project": "digits", "config": {"lr": 0.1}, "mode": "online"}
    assert fake_wandb.arguments[0]["config"] is arguments["config"]


@pytest.mark.parametrize(("create_new", "told"), [(True, "create_new"), (False, None)])
def test_a_second_run_of_a_process_is_asked_for(fake_wandb: FakeWandb, create_new: bool, told: str | None) -> None:
    open_run(plan_run(SINGLE, "auto", "global", None), SINGLE, {}, create_new=create_new)
    assert fake_wandb.arguments[0].get("reinit") == told


def test_the_users_own_reinit_wins(fake_wandb: FakeWandb) -> None:
    open_run(plan_run(SINGLE, "auto", "global", None), SINGLE, {"reinit": "return_previous"}, create_new=True)
    assert fake_wandb.arguments == [{"reinit": "return_previous"}]


# --- an inherited service ---------------------------------------------------------------------------------------------

OTHERS_SERVICE = f"3-{os.getppid()}-unix-/tmp/socket"
OWN_SERVICE = f"3-{os.getpid()}-unix-/tmp/socket"


@pytest.mark.parametrize(
    ("mode", "service", "kept"),
    [
        ("shared", OTHERS_SERVICE, False),
        ("shared", OWN_SERVICE, True),
        ("auto", OTHERS_SERVICE, True),
        ("new", OTHERS_SERVICE, True),
        ("shared", "of another form", True),
    ],
    ids=["another's", "its own", "auto", "new", "another form"],  # without process ids, which differ
)
def test_only_a_shared_run_leaves_the_service_of_another_process(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str, service: str, kept: bool
) -> None:
    monkeypatch.setenv("WANDB_SERVICE", service)
    opened(FIRST, mode, {})
    assert fake_wandb.environments[0].get("WANDB_SERVICE") == (service if kept else None)


def test_a_world_of_one_keeps_the_service_it_inherited(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SERVICE", OTHERS_SERVICE)
    opened(SINGLE, "shared", {})
    assert fake_wandb.environments[0]["WANDB_SERVICE"] == OTHERS_SERVICE


@pytest.mark.usefixtures("fresh_wandb")
def test_the_service_writes_its_owners_process_id_where_it_is_looked_for() -> None:
    wandb.setup()
    assert re.match(rf"\d+-{os.getpid()}-", os.environ["WANDB_SERVICE"])


# --- the file beside an offline run -----------------------------------------------------------------------------------


def test_what_the_run_file_does_not_hold_is_recorded_beside_it(fake_wandb: FakeWandb) -> None:
    run = opened(SECOND, "shared", {"mode": "offline"}, group="night")
    sidecar = Path(run.dir).parent / "dist-wandb.json"
    assert json.loads(sidecar.read_text()) == {
        "format": 1,
        "run_id": "exp",
        "base_id": "exp",
        "group": "night",
        "shared": True,
        "label": "rank-1",
        "primary": False,
        "update_finish_state": False,
        "run_mode": "shared",
        "rank_scope": "global",
        "global_rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "world_size": 2,
        "num_nodes": 1,
    }
    assert list(sidecar.parent.glob(".dist-wandb*")) == []
    assert fake_wandb.runs == [run]


@pytest.mark.parametrize("mode", ["auto", "new"])
def test_offline_runs_of_one_writer_have_the_file_too(fake_wandb: FakeWandb, mode: str) -> None:
    opened(FIRST, mode, {"mode": "offline"})
    record = json.loads((Path(fake_wandb.runs[0].dir).parent / SIDECAR_NAME).read_text())
    assert (record["run_mode"], record["shared"], record["primary"]) == (mode, False, True)


def test_the_writer_of_an_online_shared_run_has_it_too_as_its_upload_may_be_cut_off(fake_wandb: FakeWandb) -> None:
    opened(SECOND, "shared", {"mode": "online"})
    record = json.loads((Path(fake_wandb.runs[0].dir).parent / SIDECAR_NAME).read_text())
    assert (record["shared"], record["label"], record["primary"]) == (True, "rank-1", False)


@pytest.mark.parametrize(("mode", "wandb_mode"), [("auto", "online"), ("new", "online"), ("shared", "disabled")])
def test_other_runs_have_no_such_file(fake_wandb: FakeWandb, mode: str, wandb_mode: str) -> None:
    opened(FIRST, mode, {"mode": wandb_mode})
    assert not list(fake_wandb.directory.rglob("*dist-wandb.json*"))


# --- the environment of an upload -------------------------------------------------------------------------------------


ROLES: dict[str, Any] = {"shared": True, "label": "rank-1", "primary": False, "finishes": False, "resume": None}


def test_an_upload_gets_the_role_of_the_writer_and_nothing_of_another_run(
    bare_environment: None,  # noqa: ARG001  # used for its effect
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name in ("RUN_ID", "NAME", "TAGS", "RUN_GROUP", "RESUME", "SERVICE", "MODE", "SILENT", "X_LABEL"):
        monkeypatch.setenv(f"WANDB_{name}", "another's")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    monkeypatch.setenv("WANDB_X_GRAPHQL_RETRY_MAX", "2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", "/opt/lib"]))
    before = dict(os.environ)
    environment = upload_environment.upload_environment(tmp_path, **ROLES)
    assert {name: value for name, value in environment.items() if name.startswith("WANDB_")} == {
        "WANDB_MODE": "shared",
        "WANDB_DIR": str(tmp_path),
        "WANDB_X_LABEL": "rank-1",
        "WANDB_X_PRIMARY": "false",
        "WANDB_X_UPDATE_FINISH_STATE": "false",
        "WANDB_ENTITY": "team",
        "WANDB_X_GRAPHQL_RETRY_MAX": "2",
        "WANDB_X_FILE_STREAM_RETRY_MAX": "6",
        "WANDB_X_FILE_TRANSFER_RETRY_MAX": "6",
    }
    assert environment["PATH"] == before["PATH"]
    assert (environment["PYTHONSAFEPATH"], environment["PYTHONPATH"]) == ("1", "/opt/lib")
    assert dict(os.environ) == before


@pytest.mark.usefixtures("bare_environment")
def test_the_upload_of_a_plain_run_has_no_label(tmp_path: Path) -> None:
    plain = {"shared": False, "label": None, "primary": True, "finishes": True, "resume": "must"}
    environment = upload_environment.upload_environment(tmp_path, **plain)  # type: ignore[arg-type]  # of several types
    wanted = {"MODE": "online", "X_PRIMARY": "true", "X_UPDATE_FINISH_STATE": "true", "RESUME": "must"}
    assert {name: environment[f"WANDB_{name}"] for name in wanted} == wanted
    assert "WANDB_X_LABEL" not in environment


@pytest.mark.usefixtures("bare_environment")
def test_settings_of_the_current_directory_do_not_go_with_an_upload(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A proxy with certificates that are not checked would get the key on its way to the right server."""
    project = tmp_path / "project"
    (project / "wandb").mkdir(parents=True)
    (project / "wandb" / "settings").write_text("[default]\ninsecure_disable_ssl = true\nhttps_proxy = http://evil\n")
    monkeypatch.chdir(project)
    (tmp_path / "attempt").mkdir()
    for where in (".", str(project)):
        monkeypatch.setenv("WANDB_DIR", where)
        environment = upload_environment.upload_environment(tmp_path / "attempt", **ROLES, server="https://own.example")
        assert environment["WANDB_BASE_URL"] == "https://own.example"
        assert list((tmp_path / "attempt").rglob("*")) == [tmp_path / "attempt" / "wandb"]


# --- rows -------------------------------------------------------------------------------------------------------------


class Recorder:
    """A run that only remembers what was logged."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        self.calls.append((row, kwargs))


def plan_of(topology: Topology, mode: str) -> RunPlan:
    return plan_run(topology, mode, "global", "exp")


def written(
    plan: RunPlan,
    metrics: dict[str, Any],
    step: int | None = 7,
    *,
    step_metric: str | None = "global_step",
    commit: bool | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    run: Any = Recorder()
    RunWriter(run, plan, step_metric).write(metrics, step, commit=commit)
    (call,) = run.calls
    return call  # type: ignore[no-any-return]  # a Recorder


PLAIN = plan_of(FIRST, "new")


def test_a_row_has_its_step_and_what_was_logged_is_not_changed() -> None:
    metrics = {"loss": 0.5}
    assert written(PLAIN, metrics) == ({"loss": 0.5, "global_step": 7}, {})
    assert metrics == {"loss": 0.5}


def test_without_a_step_or_a_step_metric_the_row_has_no_x_axis() -> None:
    assert "global_step" not in written(PLAIN, {"loss": 0.5}, None)[0]
    assert not {"global_step", None} & set(written(PLAIN, {"loss": 0.5}, 7, step_metric=None)[0])


def test_an_x_axis_among_the_metrics_stays_in_the_row() -> None:
    assert written(PLAIN, {"loss": 0.5, "global_step": 3}, None)[0] == {"loss": 0.5, "global_step": 3}


@pytest.mark.parametrize("commit", [True, False, None])
def test_commit_is_handed_on_only_where_it_was_given(commit: bool | None) -> None:
    assert written(PLAIN, {"loss": 0.5}, commit=commit)[1] == ({} if commit is None else {"commit": commit})


def test_a_rank_without_a_run_writes_nothing() -> None:
    RunWriter(NullRun(), plan_of(SECOND, "auto"), "global_step").write({"loss": 0.5}, 7)


def test_every_writer_defines_the_x_axis_alike(fake_wandb: FakeWandb) -> None:
    for topology in (FIRST, SECOND):
        axes.define_step_metric(opened(topology, "shared", {}), "global_step")
    assert [run.defined for run in fake_wandb.runs] == [
        [("global_step", {}), ("*", {"step_metric": "global_step", "step_sync": False})]
    ] * 2


# --- the run of ranks without one -------------------------------------------------------------------------------------


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


def test_a_null_run_is_falsy_and_empty() -> None:
    run = NullRun()
    assert repr(run) == "NullRun()"
    assert not run
    assert not run.config
    assert not run.summary["best"]
    assert len(run.config) == 0
    assert list(run.config) == []
    assert "lr" not in run.config
    assert dict(run.config.items()) == {}


def test_the_summary_of_a_null_run_reads_what_was_written_and_defaults() -> None:
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
    assert list(run.summary.keys()) == list(run.summary)
    assert list(run.summary.values()) == [0.5, 3, "a", 1]
    del run.summary["best"]
    del run.summary["best"]
    assert not run.summary["best"]
    assert copy.deepcopy(run).summary["epoch"] == pickle.loads(pickle.dumps(run)).summary["epoch"] == 3  # noqa: S301


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing unknown had been used yet."""
    monkeypatch.setattr(null_run, "_has_told_of_unknown", False)


USES: list[Callable[[Any], Any]] = [
    *(lambda part: part > 0, lambda part: part >= 0, lambda part: part < 0, lambda part: part <= 0),
    *(lambda part: 5 < part, lambda part: part == 0, lambda part: part == "done"),  # noqa: SIM300  # the other order
    lambda part: 2 * part + 1 > 3,
    lambda part: int(part) > 0,
    lambda part: float(part) > 0,
]


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("use", USES)
def test_what_is_not_known_compares_as_nan_and_is_told_once(
    use: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    run: Any = NullRun()
    for _ in range(3):
        assert not use(run.summary["best"])
    (said,) = [found.getMessage() for found in caplog.records]
    assert "on a rank without a run" in said
    assert "run.summary.get(name, 0)" in said


def test_what_is_not_known_can_be_computed_with_and_shown() -> None:
    part: Any = NullRun().step
    results = [-part, abs(part), round(part), part + 1, 1 - part, part * 2, 2 / part, part**2, 7 % part, part // 2]
    assert {type(result) for result in results} == {NullPart}
    assert f"{part:.3f} {part} {part:d} {part:>5}" == "nan NullRun() NullRun()   nan"
    assert hash(part) == hash(part)
    assert part != NullPart()
    assert (part.get("a", 1), list(part.keys()), list(part.values()), list(part.items())) == (1, [], [], [])
    assert not part.get("a").deeper


def test_a_null_run_lists_what_a_run_has_for_its_users() -> None:
    names = dir(NullRun())
    assert {"log", "summary", "config", "finish", "watch", "name", "url"} <= set(names)
    assert not [name for name in names if name.startswith("_") or name in ("show_config", "show_facts", "facts")]


def test_before_wandb_is_imported_it_lists_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb.sdk")
    assert {"log", "summary", "config", "name", "url"} <= set(dir(NullRun()))


def known_of(run: Any) -> list[str | None]:
    return [run.id, run.name, run.url]


def test_a_null_run_tells_what_is_known_of_the_run_and_forgets_what_is_set() -> None:
    run: Any = NullRun("exp", "base", "https://w")
    run.id = "other"
    assert known_of(run) == ["exp", "base", "https://w"]
    assert known_of(NullRun()) == [None, None, None]


@pytest.mark.parametrize("name", ["__deepcopy__", "__getstate_extra__", "__array__", "__len_hint__", "__fspath__"])
def test_a_null_run_does_not_pretend_to_speak_protocols(name: str) -> None:
    assert not hasattr(NullRun(), name)


@pytest.mark.parametrize(
    "twin",
    [copy.copy, copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))],  # noqa: S301  # its own pickle
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_null_run_survives_copies_and_pickles(twin: Callable[[NullRun], NullRun]) -> None:
    run = twin(NullRun("exp", "base", "https://w"))
    assert isinstance(run, NullRun)
    assert known_of(run) == ["exp", "base", "https://w"]


def test_a_null_run_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), NullRun():
        raise KeyError


@pytest.mark.parametrize("name", [name for name in dir(Run) if not name.startswith("_")])
def test_whatever_a_run_has_a_null_run_takes(name: str) -> None:
    assert not getattr(NullRun(), name)


# --- small things -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "silent"), [("true", True), ("1", True), ("YES", True), ("false", False), ("", False)]
)
def test_silence_is_what_wandb_calls_silence(monkeypatch: pytest.MonkeyPatch, value: str, silent: bool) -> None:
    assert not console.is_silent()
    monkeypatch.setenv("WANDB_SILENT", value)
    assert console.is_silent() is silent


@pytest.mark.parametrize(
    ("wandb_mode", "expected"),
    [
        ("online", "https://wandb.example/team/digits/runs/exp"),
        ("offline", "offline, in {directory}"),
        ("disabled", "nowhere, as W&B is disabled"),
    ],
)
def test_where_a_run_is_to_be_found(fake_wandb: FakeWandb, wandb_mode: str, expected: str) -> None:
    run = opened(FIRST, "auto", {"mode": wandb_mode})
    assert run_metadata.where(run) == expected.format(directory=Path(fake_wandb.runs[0].dir).parent)


def test_of_a_shared_run_offline_the_directory_of_all_ranks_is_told(fake_wandb: FakeWandb, tmp_path: Path) -> None:
    plan = plan_run(FIRST, "shared", "global", "exp")
    run: Any = open_run(plan, FIRST, {"mode": "offline"})
    run.dir = str(tmp_path / "wandb/rank-0/wandb/offline-run-1-exp/files")  # as wandb lays them out
    assert run_metadata.where(run, plan) == f"offline, a file for each rank below {tmp_path / 'wandb'}"
    assert run_metadata.where(run) == f"offline, in {tmp_path / 'wandb/rank-0/wandb/offline-run-1-exp'}"
    assert len(fake_wandb.runs) == 1


@pytest.mark.parametrize("wandb_mode", ["offline", "disabled"])
def test_a_run_without_an_address_is_not_asked_for_it(wandb_mode: str) -> None:
    """wandb warns of every such question."""
    run: Any = mock.Mock(
        spec=["offline", "disabled"], offline=wandb_mode == "offline", disabled=wandb_mode == "disabled"
    )
    assert run_metadata.url(run) is None


def test_without_a_run_there_is_nothing_to_be_found() -> None:
    assert run_metadata.where(NullRun()) == "nowhere"


def test_the_page_of_a_group_is_that_of_its_project(fake_wandb: FakeWandb) -> None:
    opened(FIRST, "new", {})
    run: Any = fake_wandb.runs[0]
    assert run_metadata.group_url(run, "night #1/a") == "https://wandb.example/team/digits/groups/night%20%231%2Fa"


def test_without_group_run_or_address_a_group_has_no_page(fake_wandb: FakeWandb) -> None:
    assert run_metadata.group_url(opened(FIRST, "auto", {}), None) is None
    assert run_metadata.group_url(opened(FIRST, "auto", {"mode": "offline"}), "night") is None
    assert run_metadata.group_url(NullRun(), "night") is None
    assert len(fake_wandb.runs) == 2


def test_only_what_json_holds_is_told_to_ranks_that_were_not_given_it() -> None:
    told = job_arguments.told_to_others(
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
    assert repr(job_arguments.told_to_others({"config": nan})) == repr({"config": nan})


@pytest.mark.parametrize("name", ["entity", "project", "name", "notes", "tags", "group", "job_type", "dir", "mode"])
def test_what_describes_the_job_is_told(name: str) -> None:
    assert job_arguments.told_to_others({name: "x"}) == {name: "x"}
    assert job_arguments.told_to_others({name: None}) == {}


def test_a_run_is_handed_on_as_a_pickle() -> None:
    run: Any = SimpleNamespace(id="exp")
    data = handover.pickled(run)
    assert data is not None
    assert handover.unpickled(data) == run


def test_a_run_is_handed_on_with_its_config_which_wandb_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(config={"lr": 0.1, "names": {1: "a"}})
    data = handover.pickled(run)
    filled: list[object] = []
    monkeypatch.setattr(handover, "fill_config", lambda _, values: filled.append(values))
    assert data is not None
    assert handover.unpickled(data)
    assert filled == [{"lr": 0.1, "names": {1: "a"}}]


@pytest.mark.parametrize(
    "run",
    [None, NullRun(), mock.Mock(), SimpleNamespace(handle=lambda: None)],
    ids=["None", "NullRun", "Mock", "namespace"],
)
def test_what_is_no_run_or_cannot_be_pickled_is_not_handed_on(run: Any) -> None:
    assert handover.pickled(run) is None


def test_the_run_in_progress_is_wandbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb, "run", None)
    assert run_metadata.running_run() is None
    run: Any = object()
    monkeypatch.setattr(wandb, "run", run)
    assert run_metadata.running_run() is run


def test_without_wandb_loaded_no_run_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb")
    assert run_metadata.running_run() is None
    assert "wandb" not in sys.modules
