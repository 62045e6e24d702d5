"""What Lightning's own tests demand of a W&B logger, checked with `DistWandbLogger` and with their kind of mock.

Their mock replaces the whole module `wandb` by a minimal one: no settings, no setup, and runs without most
attributes. Demands that `test_lightning_world_of_one.py` checks by comparison with the stock logger are not repeated.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from docstrings import documented_options
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning_trainers import as_rank, quiet_trainer
from processes import run_job

from dist_wandb import DistWandbLogger
from dist_wandb.session import registry
from dist_wandb.settings.options import OPTION_NAMES, Limits, Options

pytestmark = pytest.mark.newest  # the demands of the newest Lightning


class FakeRun:
    """A run with an id, a config and five mocked methods, but without other attributes of wandb's runs."""

    def __init__(self, run_id: str = "made-up") -> None:
        self.id = run_id
        for method in ("log", "watch", "log_artifact", "use_artifact", "define_metric"):
            setattr(self, method, mock.Mock())
        self.config = mock.Mock()


class Bare:
    """A run with even fewer attributes."""

    id, name, step = "made-up", "night", 0


@pytest.fixture
def fake_run() -> Any:
    return FakeRun()


@pytest.fixture(autouse=True)
def wandb(
    bare_environment: None,  # noqa: ARG001  # must run first
    new_process: None,  # noqa: ARG001  # must run first
    ended_exchanges: None,  # noqa: ARG001  # must run first
    fake_run: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """Replace the module wandb."""
    module: Any = ModuleType("wandb")
    module.init = mock.Mock(return_value=fake_run)
    module.run = None
    for name in ("require", "Api", "Artifact", "Image", "Audio", "Video", "Table"):
        setattr(module, name, mock.Mock())
    lib: Any = ModuleType("wandb.sdk.lib")
    runs: Any = ModuleType("wandb.wandb_run")
    lib.RunDisabled = runs.Run = FakeRun
    parts = {"wandb": module, "wandb.sdk": ModuleType("wandb.sdk"), "wandb.sdk.lib": lib, "wandb.wandb_run": runs}
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, name, part)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield module
    changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
    assert {name for name in changed if "WANDB" in name} <= {"WANDB_MODE"}  # by offline=True, as in the stock logger


def trainer(logger: Any, directory: Path, **more: Any) -> Trainer:
    return quiet_trainer(
        logger, default_root_dir=directory, **{"limit_train_batches": 3, "limit_val_batches": 1, **more}
    )


# --- the constructor, and names ---------------------------------------------------------------------------------------


def test_a_new_wandb_does_not_get_arguments_that_it_warns_about(wandb: Any, fake_run: Any) -> None:
    given: list[Any] = []

    def init(anonymous: object = "not set", **_arguments: Any) -> Any:
        given.append(anonymous)
        return fake_run

    wandb.init = init
    _ = DistWandbLogger().experiment
    _ = DistWandbLogger(anonymous=True, experiment=None).experiment
    assert given == ["not set", "allow"]
    wandb.require.assert_not_called()


def test_a_run_with_hardly_any_attributes_can_be_used(wandb: Any, tmp_path: Path) -> None:
    wandb.init.return_value = Bare()
    logger = DistWandbLogger(id="made-up", offline=True)
    first = trainer(logger, tmp_path)
    assert logger.experiment
    assert first.log_dir == logger.save_dir
    second = pickle.loads(pickle.dumps(first))  # noqa: S301  # its own pickle
    assert type(second.logger) is DistWandbLogger
    assert second.logger.experiment
    assert wandb.init.call_args.kwargs["id"] == "made-up"
    for session in registry.open_sessions():
        registry.shutdowns[session].end_with_process(0, failed=False)


# --- in a Trainer -----------------------------------------------------------------------------------------------------


def test_its_run_is_open_before_other_loggers_start(wandb: Any, tmp_path: Path) -> None:
    """W&B's tensorboard patch must be applied before the other logger creates its writer."""
    opened: list[int] = []

    class Other(CSVLogger):
        @property
        def experiment(self) -> Any:
            opened.append(wandb.init.call_count)
            return mock.MagicMock()

    trainer([Other(tmp_path), DistWandbLogger()], tmp_path, max_steps=1, limit_train_batches=0).fit(BoringModel())
    assert opened
    assert min(opened) == 1


# --- pickles, and further ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])  # noqa: S301
def test_a_copy_of_a_logger_continues_the_same_run(wandb: Any, fake_run: Any, twin_of: Any) -> None:
    logger = DistWandbLogger(project="digits", save_dir="logs", prefix="fold")
    wandb.init.assert_not_called()
    twin = twin_of(logger)
    wandb.init.assert_called_once()
    wandb.run = fake_run
    with pytest.warns(UserWarning, match="already in progress"):
        twin.log_metrics({"acc": 1.0})
    assert (twin.name, twin.save_dir, twin.version) == (logger.name, logger.save_dir, logger.version)
    fake_run.log.assert_called_once_with({"fold-acc": 1.0})
    wandb.init.assert_called_once()


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])  # noqa: S301
def test_the_experiment_of_a_rank_without_a_run_can_be_copied(monkeypatch: pytest.MonkeyPatch, twin_of: Any) -> None:
    as_rank(monkeypatch, 1)
    experiment: Any = DistWandbLogger(id="exp", limits=Limits(join_timeout=0.1, finish_timeout=0.1)).experiment
    twin: Any = twin_of(experiment)
    assert issubclass(type(twin), DummyExperiment)
    assert (twin.id, experiment.id) == ("exp", "exp")
    assert twin.something(foo="bar") is None
    assert not twin.use_artifact("net:v0").download(root="x")
    twin.finish()


def test_a_child_that_cannot_attach_to_its_parents_run_reopens_it(
    wandb: Any, fake_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the environment had been restored since the parent opened its run."""
    wandb.init.return_value = Parents()
    parent = DistWandbLogger(id="exp")
    assert isinstance(parent.experiment, Parents)
    child = pickle.loads(pickle.dumps(parent))  # noqa: S301
    registry.remove(registry.open_sessions()[0])  # which the child does not have
    wandb.init.return_value = fake_run
    assert child.experiment is fake_run
    assert "reopens the run of its parent, because wandb could not attach to it: no such run" in caplog.text
    assert wandb.init.call_args.kwargs["id"] == "exp"


class Parents(FakeRun):
    """A run whose service a child cannot find."""

    def __reduce__(self) -> tuple[type[Lost], tuple[()]]:
        return Lost, ()


class Lost:
    """What a child receives of it."""

    @property
    def config(self) -> Any:
        raise RuntimeError("no such run")


# --- LightningCLI -----------------------------------------------------------------------------------------------------


def options_of(logger: Any) -> Options:
    assert logger.experiment
    session = registry.open_sessions()[-1]
    session.finish()
    return session.options


def logger_of(*arguments: str) -> Logger | None:
    with mock.patch.object(sys, "argv", ["train.py"]):
        command = LightningCLI(BoringModel, args=list(arguments), run=False, save_config_callback=None)
    made: Logger | None = command.trainer.logger
    return made


def test_the_help_of_a_lightning_cli_documents_all_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # so that words are not broken at hyphens
    with pytest.raises(SystemExit):
        logger_of("--trainer.logger.help=dist_wandb.DistWandbLogger")
    shown = " ".join(capsys.readouterr().out.split())
    texts = documented_options(DistWandbLogger)
    assert tuple(texts) == OPTION_NAMES
    assert {name: text in shown for name, text in texts.items()} == dict.fromkeys(OPTION_NAMES, True)


def test_a_lightning_cli_knows_all_arguments_and_reads_its_printed_config(
    wandb: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.Settings = mock.MagicMock()
    given = {
        "project": "digits",
        "log_model": "all",
        "run_mode": "shared",
        "rank_scope": "worker",
        "reduce": '{"tokens": "sum", "*": "max"}',
        "spread": '["train/*"]',
        "per_rank": "false",
        "limits.finish_timeout": "7",
        "config_sync": "off",
        "system_metrics": "all-nodes",
        "strict": "true",
    }
    options = ["--trainer.logger=dist_wandb.DistWandbLogger"]
    options += [f"--trainer.logger.{name}={value}" for name, value in given.items()]
    first = logger_of(*options)
    with pytest.raises(SystemExit):
        logger_of(*options, "--print_config")
    printed = capsys.readouterr().out
    assert "log_model: all" in printed
    (tmp_path / "printed.yaml").write_text(printed)
    second = logger_of(f"--config={tmp_path / 'printed.yaml'}")
    assert [type(logger) for logger in (first, second)] == [DistWandbLogger] * 2
    assert [logger.name for logger in (first, second) if logger is not None] == ["digits"] * 2
    chosen = options_of(first)
    assert (chosen.run_mode, chosen.reduce) == ("shared", {"tokens": "sum", "*": "max"})
    assert (chosen.spread, chosen.per_rank) == (["train/*"], False)
    assert chosen == options_of(second)


# --- order of imports -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_package_can_be_imported_while_wandb_is_a_mock(tmp_path: Path) -> None:
    script = """
import importlib.machinery, sys, types
from unittest import mock
assert not [name for name in sys.modules if name.startswith("dist_wandb")]
for name in [name for name in sys.modules if name.partition(".")[0] == "wandb" or name.endswith(".loggers.wandb")]:
    del sys.modules[name]  # a warm interpreter has imported them
fake = types.ModuleType("wandb")
fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # transformers, which torchmetrics may import, wants one
fake.init, fake.run = mock.Mock(return_value=mock.Mock(spec=["log", "config", "id"], id="exp")), None
sys.modules["wandb"] = fake
import lightning.pytorch.loggers.wandb as stock
assert "wandb.sdk" not in sys.modules
stock._WANDB_AVAILABLE = True
from dist_wandb import DistWandbLogger
logger = DistWandbLogger()
logger.log_metrics({"a": 1.0}, 2)
fake.init.return_value.log.assert_called_once_with({"a": 1.0, "trainer/global_step": 2})
"""
    run_job([sys.executable, "-c", script], cwd=tmp_path).check()
