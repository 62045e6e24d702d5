"""The logger in the name space `pytorch_lightning`. What is imported decides, so each test has its own process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from processes import clean_environment, run_job
from stored import ended_runs, read_history

NOTHING_IMPORTED = """
import sys, warnings
warnings.simplefilter("ignore")
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
    del sys.modules[name]  # of a warm interpreter
"""


def run(directory: Path, code: str) -> None:
    run_job([sys.executable, "-c", NOTHING_IMPORTED + code], cwd=directory, environment=clean_environment()).check()


@pytest.mark.slow
def test_the_logger_belongs_to_what_the_script_imports_after_it_also_in_a_lightning_cli(tmp_path: Path) -> None:
    code = """
import copy, pickle, sys
import dist_wandb
from dist_wandb import DistWandbLogger
class Mine(DistWandbLogger):
    pass
import pytorch_lightning as pl
from pytorch_lightning.loggers import WandbLogger
assert DistWandbLogger.download_artifact is WandbLogger.download_artifact and not hasattr(DistWandbLogger, "nothing")
made = DistWandbLogger(run_mode="new"), Mine(run_mode="new")
made += tuple(pickle.loads(pickle.dumps(logger)) for logger in made) + tuple(map(copy.deepcopy, made))
for logger in made:
    assert isinstance(logger, WandbLogger) and isinstance(logger, DistWandbLogger)
assert [isinstance(logger, Mine) for logger in made] == [False, True] * 3
known = dist_wandb.DistWandbLogger
assert issubclass(known, WandbLogger) and isinstance(made[0], known) and not issubclass(known, Mine)
assert "lightning" not in sys.modules

from jsonargparse import lazy_instance
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.demos.boring_classes import BoringModel
defaults = {"logger": lazy_instance(DistWandbLogger, project="digits", run_mode="shared")}
command = LightningCLI(BoringModel, args=[], run=False, save_config_callback=None, trainer_defaults=defaults)
lazy = command.trainer.logger
assert isinstance(lazy, DistWandbLogger) and lazy.name == "digits" and lazy._options.run_mode == "shared"

from lightning.pytorch.loggers import WandbLogger as Other  # as a library may do
both = DistWandbLogger(project="digits", id="exp")
assert isinstance(both, WandbLogger) and isinstance(both, Other)
assert (both.name, both.version) == ("digits", "exp")
assert isinstance(both, known) and isinstance(made[0], dist_wandb.DistWandbLogger)
assert not isinstance(made[0], Other)
from dist_wandb.lightning import LightningDistWandbLogger, PytorchLightningDistWandbLogger
assert issubclass(LightningDistWandbLogger, Other) and not issubclass(LightningDistWandbLogger, WandbLogger)
assert isinstance(made[0], PytorchLightningDistWandbLogger)
assert not isinstance(made[0], LightningDistWandbLogger)
assert pickle.loads(pickle.dumps(both)).version == "exp"
for kind in (DistWandbLogger, known, Mine, type(made[1]), type(both)):
    assert pickle.loads(pickle.dumps(kind)) is kind
"""
    run(tmp_path, code)


@pytest.mark.slow
def test_without_an_imported_name_space_the_logger_belongs_to_lightning(tmp_path: Path) -> None:
    code = """
import sys
from dist_wandb import DistWandbLogger
assert not [name for name in sys.modules if name in ("lightning", "pytorch_lightning")]
logger = DistWandbLogger()
assert "pytorch_lightning" not in sys.modules
from lightning.pytorch.loggers import WandbLogger
assert isinstance(logger, WandbLogger)
"""
    run(tmp_path, code)


@pytest.mark.slow
@pytest.mark.newest  # reads the rows
def test_fabric_without_lightning(tmp_path: Path) -> None:
    code = """
sys.modules["lightning"] = None
from dist_wandb import DistWandbLogger
from lightning_fabric import Fabric
logger = DistWandbLogger(project="tests", id="exp")
fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
fabric.launch()
for step in range(3):
    fabric.log("loss", 0.5 * step, step=step)
logger.experiment.finish()
"""
    run(tmp_path, code)
    (stored,) = ended_runs(tmp_path, 1)
    rows = read_history(stored.path)
    assert [(row["trainer/global_step"], row["loss"]) for row in rows] == [(0, 0), (1, 0.5), (2, 1)]
