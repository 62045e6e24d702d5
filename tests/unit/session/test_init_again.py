"""`init` while a run is open: what wandb does, figure by figure, and the same for all ranks of a job."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import wandb
from fakes import FakeWandb

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.session import registry


def ended(fake: FakeWandb) -> list[list[int | None]]:
    return [list(run.exit_codes) for run in fake.runs]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("Shell", (), {"config": {}})()  # older versions of wandb read it
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


@pytest.fixture(params=[pytest.param("wandb", marks=pytest.mark.newest), "dist_wandb"])  # seen with wandb 0.31
def module(
    request: pytest.FixtureRequest,
    bare_environment: None,  # noqa: ARG001  # used for its effect
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """wandb itself, or this package in its place, offline."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")  # wandb's own runs stay open: their hooks would get later tests' output
    for name in ("run", "config", "summary", "log", "define_metric"):
        monkeypatch.setattr(wandb, name, getattr(wandb, name))  # as it is before its runs, some of which stay open
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # it keeps the environment in which it was used first
    module: ModuleType = {"wandb": wandb, "dist_wandb": dist_wandb}[request.param]
    yield module
    for session in registry.open_sessions():
        session.finish()
    wandb.teardown()


@pytest.mark.slow
def test_by_default_the_open_run_is_returned_and_arguments_are_ignored(module: Any) -> None:
    first = module.init(project="p", id="first", name="a", config={"lr": 1})
    again = module.init(project="q", id="other", name="b", config={"lr": 2, "x": 3}, tags=["t"])
    assert again is first
    assert (again.project, again.id, again.name, dict(again.config), again.tags) == ("p", "first", "a", {"lr": 1}, ())
    assert module.init(reinit="return_previous") is module.init(reinit=False) is first
    with module.init() as block:
        assert block is first
    assert module.run is None  # the inner block has ended it
    with pytest.raises((module.UsageError, ConfigurationError), match=r"(is|was) finished"):
        first.log({"loss": 1.0})


@pytest.mark.slow
def test_a_run_that_must_be_resumed_is_an_error_while_one_is_open(module: Any) -> None:
    run = module.init(id="first")
    for run_id in ("other", "first"):
        with pytest.raises(module.Error, match="Cannot resume a run while another run is"):
            module.init(id=run_id, resume="must")
    with pytest.raises(Exception, match="run ID first is in use"):
        module.init(id="first", reinit="create_new")
    assert module.run is run


@pytest.mark.slow
def test_a_run_beside_leaves_wandb_run_alone(module: Any) -> None:
    first = module.init(id="first")
    beside = module.init(id="beside", reinit="create_new")
    assert (module.run, module.run.id, beside.id) == (first, "first", "beside")
    assert module.init() is beside
    module.finish()
    assert (module.run, module.init()) == (None, beside)
    with pytest.raises(module.Error, match=r"You must call wandb\.init"):
        module.log({"loss": 1.0})
    beside.finish()


@pytest.mark.slow
@pytest.mark.parametrize("reinit", ["finish_previous", True])
def test_earlier_runs_are_finished_and_refuse_rows(module: Any, reinit: Any) -> None:
    earlier = module.init(id="first"), module.init(id="beside", reinit="create_new")
    run = module.init(id="next", reinit=reinit)
    assert (run.id, module.run.id) == ("next", "next")
    for finished in earlier:
        with pytest.raises((module.UsageError, ConfigurationError), match=r"(is|was) finished"):
            finished.log({"loss": 1.0})
    module.finish()
    assert module.run is None


@pytest.mark.slow
def test_disabled_runs_are_made_anew(module: Any) -> None:
    first, second = (module.init(mode="disabled", config={"lr": lr}) for lr in (1, 2))
    assert (first is second, dict(second.config), module.run is second) == (False, {"lr": 2}, True)
    run = module.init(id="run")
    beside = module.init(mode="disabled", config={"lr": 3})
    assert (run.id, dict(beside.config), module.run is beside) == ("run", {"lr": 3}, True)
    assert module.init() is run


@pytest.mark.slow
@pytest.mark.parametrize("is_open", [True, False])
def test_a_config_that_cannot_be_read_is_an_error(module: Any, caplog: pytest.LogCaptureFixture, is_open: bool) -> None:
    run = module.init(id="first") if is_open else None
    both = {"config_exclude_keys": ["lr"], "config_include_keys": ["seed"]}
    for arguments, kind, message in (
        ({"config": "missing.yaml"}, module.Error, "config file missing.yaml doesn't exist"),
        ({"config": {"lr": 1}, **both}, module.UsageError, "at most only one of exclude or include"),
        ({"config": 3}, TypeError, "config must be a dict or have a __dict__ attribute"),
    ):
        with pytest.raises(kind, match=message):
            module.init(**arguments)
    Path("there.yaml").write_text("lr:\n  value: 5\n", encoding="utf-8")
    again = module.init(config="there.yaml", settings={})
    assert dict(again.config) == ({} if is_open else {"lr": 5})
    assert run in (None, again)
    assert "could not open its run" not in caplog.text


WRONG: list[dict[str, Any]] = [
    *({name: 3} for name in ("project", "entity", "name", "notes", "group", "job_type", "dir", "id")),
    *({"project": "a/b"}, {"tags": 3}, {"tags": [1]}, {"mode": "bogus"}, {"settings": {"bogus": 1}}, {"bogus": 1}),
    *({name: "bogus"} for name in ("resume", "reinit", "resume_from", "fork_from", "force", "save_code")),
    {"resume_from": "a?_step=1", "fork_from": "a?_step=1"},
]
RIGHT: list[dict[str, Any]] = [
    *({"name": "it's"}, {"notes": "two\nlines"}, {"dir": Path("there")}, {"tags": "abc"}, {"tags": ["a b", "ü"]}),
    *({"resume": True}, {"resume": "never"}, {"reinit": False}, {"force": 0}, {"settings": {"run_name": "x"}}),
    *({"project": "it's ü"}, {"resume_from": "a?_step=1"}),
]


@pytest.mark.parametrize("argument", ["sync_tensorboard", "monitor_gym"])
def test_a_package_that_an_argument_needs_is_asked_for(
    module: Any, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "gymnasium", "gym"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(module.Error, match="install"):
        module.init(**{argument: True})


@pytest.mark.slow
def test_wrong_arguments_are_errors_also_while_a_run_is_open(module: Any) -> None:
    run = module.init(id="first")
    for arguments in WRONG:
        with pytest.raises((ValueError, TypeError, module.UsageError)):
            module.init(**arguments)
    for arguments in RIGHT:
        assert module.init(**arguments) is run


@pytest.mark.slow
def test_wrong_arguments_are_errors_that_scripts_catch(module: Any) -> None:
    for arguments in ({"id": ""}, {"id": " a"}, {"id": "a/b"}, {"project": "a/b"}):
        with pytest.raises(module.UsageError) as refused:
            module.init(**arguments)
        again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301  # as from a worker of a pool
        assert isinstance(again, module.UsageError)
        assert str(again) == str(refused.value)
    for call in (partial(module.init, bogus=1), partial(module.init().log, {"loss": 1.0}, step="x")):
        with pytest.raises(TypeError):
            call()


def test_it_says_once_for_each_line_that_it_returns_the_open_run(
    fake_wandb: FakeWandb, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        dist_wandb.init()
    dist_wandb.init()
    lines = [line for line in capsys.readouterr().err.splitlines() if "while the run" in line]
    assert len(lines) == 2
    assert "init was called at test_init_again.py:" in lines[0]
    assert len(fake_wandb.runs) == 1


def test_reinit_in_settings_and_the_environment_has_the_same_effect(
    fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        dist_wandb.init(settings={"reinit": "create_new"})
    monkeypatch.setenv("WANDB_REINIT", "create_new")
    dist_wandb.init()
    assert ended(fake_wandb) == [[]] * 3
    monkeypatch.setenv("WANDB_REINIT", "true")
    dist_wandb.init()
    assert ended(fake_wandb) == [[None], [None], [None], []]


def test_a_script_that_imports_ipython_is_no_notebook(fake_wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert dist_wandb.init() is dist_wandb.init()
    assert ended(fake_wandb) == [[]]


@pytest.mark.usefixtures("notebook")
def test_a_notebook_finishes_the_open_runs_but_not_for_a_decorated_function(fake_wandb: FakeWandb) -> None:
    @dist_wandb.wandb_init
    def decorated() -> list[list[int | None]]:
        dist_wandb.init()
        dist_wandb.init()
        return ended(fake_wandb)

    dist_wandb.init()
    dist_wandb.init(reinit="create_new")
    dist_wandb.init()
    assert ended(fake_wandb) == [[None], [None], []]
    assert decorated()[2:] == [[], [], [None], []]
