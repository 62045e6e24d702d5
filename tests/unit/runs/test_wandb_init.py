"""The arguments of wandb.init for a plan. No wandb process is started, except where noted."""

from __future__ import annotations

import copy
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import wandb
from fakes import FakeWandb
from opened_runs import FIRST, SECOND, SINGLE, opened, opened_by

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.runs import requested
from dist_wandb.session.opener import open_session
from dist_wandb.settings.options import Options
from dist_wandb.settings.plan import plan_run
from dist_wandb.wandb_files.sidecar import SIDECAR_NAME

OTHERS_SERVICE = f"3-{os.getppid()}-unix-/tmp/socket"
OWN_SERVICE = f"3-{os.getpid()}-unix-/tmp/socket"

pytestmark = pytest.mark.usefixtures("bare_environment")


@pytest.mark.parametrize(
    ("topology", "mode", "changed"),
    [
        (FIRST, "auto", {}),
        (FIRST, "new", {"id": "exp-rank-0", "group": "exp", "name": "base-rank-0", "dir": "logs/wandb/rank-0"}),
        (SECOND, "new", {"id": "exp-rank-1", "group": "exp", "name": "base-rank-1", "dir": "logs/wandb/rank-1"}),
        (FIRST, "shared", {"mode": None, "dir": "logs/wandb/rank-0"}),
        (SECOND, "shared", {"mode": None, "dir": "logs/wandb/rank-1"}),
    ],
)
def test_each_mode_has_its_arguments_and_does_not_change_the_users(
    fake_wandb: FakeWandb, topology: Topology, mode: str, changed: dict[str, Any]
) -> None:
    arguments = {"project": "digits", "name": "base", "dir": "logs", "mode": "online", "config": {"lr": 0.1}}
    before = dict(arguments)
    opened(topology, mode, arguments)
    (passed,) = fake_wandb.arguments
    settings = passed.pop("settings", None)
    assert passed == {**before, "id": "exp", **changed}
    assert Path(passed["dir"]).is_dir()
    assert arguments == before
    assert passed["config"] is before["config"]
    if mode == "shared":
        assert (settings.mode, settings.x_label) == ("shared", f"rank-{topology.global_rank}")
        assert settings.x_primary is settings.x_update_finish_state is (topology is FIRST)
    else:
        assert settings is None


@pytest.mark.parametrize("topology", [SINGLE, FIRST])
@pytest.mark.parametrize(
    ("arguments", "variable"),
    [
        ({"resume": "auto"}, None),
        ({"resume": True}, None),
        ({"settings": {"resume": "auto"}}, None),
        ({"settings": wandb.Settings(resume="auto")}, None),
        ({}, "auto"),
    ],
    ids=["argument", "true", "mapping", "settings", "variable"],
)
def test_auto_is_never_passed_on(
    fake_wandb: FakeWandb,
    monkeypatch: pytest.MonkeyPatch,
    topology: Topology,
    arguments: dict[str, Any],
    variable: str | None,
) -> None:
    if variable:
        monkeypatch.setenv("WANDB_RESUME", variable)
    opened_by(plan_run(topology, "auto", "global", "exp"), topology, arguments)
    assert fake_wandb.arguments[0]["resume"] == "allow"


@pytest.mark.parametrize("obstacle", ["file", "link", "link inside"])
def test_an_unusable_directory_is_replaced_by_a_private_one(
    fake_wandb: FakeWandb, caplog: pytest.LogCaptureFixture, tmp_path: Path, obstacle: str
) -> None:
    """W&B would take the shared temporary directory instead, and a stranger may have left the link."""
    victims = tmp_path / "victims"
    victims.mkdir()
    if obstacle == "file":
        (tmp_path / "logs").touch()
    else:
        place = Path("rank-1") if obstacle == "link" else Path("rank-1", "wandb")
        (tmp_path / "logs" / "wandb" / place).parent.mkdir(parents=True)
        (tmp_path / "logs" / "wandb" / place).symlink_to(victims)
    opened(SECOND, "new", {"dir": str(tmp_path / "logs")})
    chosen = Path(fake_wandb.arguments[0]["dir"])
    assert chosen.parent == Path(tempfile.gettempdir())
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("dist_wandb: rank 1 cannot write to ")
    assert str(chosen) in warning


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
def test_the_directory_of_a_rank_is_below_the_users(
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
    arguments: dict[str, Any] = {"dir": "logs"}
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
    (passed,) = fake_wandb.arguments
    assert passed.get("mode") == before.get("mode")
    if wandb_mode == "disabled":
        assert passed["dir"] == "logs"
        assert Path("logs").exists() is (where == "wandb offline")
    is_labelled = rank_mode == "shared" and wandb_mode != "disabled"  # system metrics are, when they are recorded
    found = set_by_user(passed.get("settings"))
    assert found.get("x_label") == ("rank-0" if is_labelled else None)
    assert found.items() >= set_by_user(before.get("settings")).items()


def set_by_user(settings: wandb.Settings | None) -> dict[str, Any]:
    return {} if settings is None else {name: getattr(settings, name) for name in settings.model_fields_set}


@pytest.mark.parametrize("topology", [SINGLE, FIRST], ids=["world of one", "two ranks"])
def test_the_users_directory_is_created(fake_wandb: FakeWandb, topology: Topology) -> None:
    opened(topology, "auto", {"dir": Path("a/b")})
    assert fake_wandb.arguments[0]["dir"] == Path("a/b")
    assert Path("a/b").is_dir()


def test_no_directory_is_made_if_a_settings_file_disables_wandb(fake_wandb: FakeWandb) -> None:  # noqa: ARG001  # opens it
    """As `wandb disabled` does, which ranks without a run learn of, too, without an import of wandb."""
    Path("wandb").mkdir(exist_ok=True)
    Path("wandb/settings").write_text("[default]\nmode = disabled\n")
    opened(SINGLE, "auto", {"dir": Path("a/b")})
    assert not Path("a").exists()
    assert requested.mode_if_given({}) == "disabled"
    assert requested.mode_if_given({"mode": "offline"}) == "offline"


def test_the_users_settings_object_is_copied_and_not_changed(fake_wandb: FakeWandb) -> None:
    settings = wandb.Settings(entity="team", x_label="mine")
    before, fields_before = settings.model_dump(), set(settings.model_fields_set)
    opened(SECOND, "shared", {"settings": settings})
    passed = fake_wandb.arguments[0]["settings"]
    assert passed is not settings
    assert (passed.entity, passed.mode, passed.x_label) == ("team", "shared", "rank-1")
    assert settings.model_dump() == before
    assert settings.model_fields_set == fields_before


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


@pytest.mark.usefixtures("fresh_wandb")
def test_the_service_writes_its_owners_process_id_into_the_variable() -> None:
    wandb.setup()
    assert re.match(rf"\d+-{os.getpid()}-", os.environ["WANDB_SERVICE"])


@pytest.mark.usefixtures("fresh_wandb")
def test_settings_for_several_writers_that_wandb_was_set_up_with_are_checked() -> None:
    wandb.setup(wandb.Settings(mode="shared", x_label="mine"))
    with pytest.raises(ConfigurationError, match=r"^mode='shared' \(wandb.setup\) is W&B's switch for one writer"):
        open_session(Options(), {}, integration="test", topology=SECOND)
    assert requested.replaced_label({"mode": "offline"}, "auto", 2) is None
    assert requested.replaced_label({}, "shared", 2) == "x_label='mine' (wandb.setup)"


def test_a_sidecar_records_what_the_run_file_lacks(fake_wandb: FakeWandb) -> None:
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


@pytest.mark.parametrize(
    ("mode", "wandb_mode", "expected"),
    [
        ("auto", "offline", (False, None, True)),
        ("new", "offline", (False, None, True)),
        ("shared", "online", (True, "rank-0", True)),  # for interrupted uploads
        ("auto", "online", None),
        ("shared", "disabled", None),
    ],
)
def test_runs_on_disk_and_shared_runs_have_a_sidecar(
    fake_wandb: FakeWandb, mode: str, wandb_mode: str, expected: tuple[Any, ...] | None
) -> None:
    opened(FIRST, mode, {"mode": wandb_mode})
    found = [json.loads(path.read_text()) for path in fake_wandb.directory.rglob(SIDECAR_NAME)]
    assert [(record["shared"], record["label"], record["primary"]) for record in found] == [expected] * bool(expected)


@pytest.mark.parametrize("name", ["resume_from", "fork_from"])
@pytest.mark.parametrize("in_settings", [False, True])
def test_the_primary_alone_rewinds_or_forks_a_run_of_several_writers(
    fake_wandb: FakeWandb, name: str, in_settings: bool
) -> None:
    branch = {name: "exp?_step=4"}
    for topology in (FIRST, SECOND):
        given = {"settings": wandb.Settings(**branch)} if in_settings else dict(branch)  # type: ignore[arg-type]
        opened(topology, "shared", given)
    seen = [
        getattr(settings, name, None) if in_settings else arguments.get(name)
        for settings, arguments in zip(fake_wandb.settings, fake_wandb.arguments, strict=True)
    ]
    assert seen[0] is not None
    assert seen[1] is None


@pytest.mark.parametrize("name", ["resume_from", "fork_from"])
def test_each_run_of_new_is_rewound_or_forked_from_its_own(fake_wandb: FakeWandb, name: str) -> None:
    for topology in (FIRST, SECOND):
        opened(topology, "new", {name: "old?_step=4"})
    assert [arguments[name] for arguments in fake_wandb.arguments] == ["old-rank-0?_step=4", "old-rank-1?_step=4"]


@pytest.mark.parametrize("mode", ["new", "shared"])
def test_a_name_from_the_environment_gets_its_suffix_too(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_NAME", "base")
    node = Topology(2, 0, 1, 4, 2, 2)
    opened_by(plan_run(node, mode, "worker", "exp"), node, {})
    assert fake_wandb.arguments[0]["name"] == ("base-worker-1" if mode == "shared" else "base-worker-1-rank-0")


def test_the_users_own_reinit_takes_precedence(fake_wandb: FakeWandb) -> None:
    opened_by(plan_run(SINGLE, "auto", "global", None), SINGLE, {"reinit": "return_previous"}, create_new=True)
    assert fake_wandb.arguments == [{"reinit": "return_previous"}]
