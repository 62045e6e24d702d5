"""The logger in a LightningCLI, and where W&B's module is a mock of the user's tests, as in Lightning's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from docstrings import documented_options
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import Logger
from processes import run_job

from dist_wandb import DistWandbLogger
from dist_wandb.session import registry
from dist_wandb.settings.options import OPTION_NAMES, Options

pytestmark = pytest.mark.newest  # the demands of the newest Lightning


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


@pytest.mark.usefixtures("fake_wandb")
def test_a_lightning_cli_knows_all_arguments_and_reads_its_printed_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
logger.finalize("success")
fake.run = mock.Mock()  # each attribute is true
DistWandbLogger(sync_tensorboard=True).log_metrics({"a": 1.0})
fake.run.log.assert_called_once_with({"a": 1.0})
"""
    run_job([sys.executable, "-c", script], cwd=tmp_path).check()
