"""Lightning with the real wandb: the results of the stock logger, on all ranks, without its outdated warnings."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyExperiment
from lightning_trainers import Layer, samples, trainer_of_two
from processes import python, run_job
from wandb_server import WandbServer

from dist_wandb import DistWandbLogger, Limits

STALE = ("anonymous", "require(")  # wandb warns about these at every start of the stock logger
FACTS = ("id", "name", "url", "entity", "project", "project_url", "path", "group", "job_type", "tags", "notes")
STATE = ("dir", "start_time", "offline", "disabled", "resumed", "sweep_id")
BEFORE = dict(os.environ)


def report(rank: int, what: str, value: object) -> None:
    sys.stdout.write(f"\nSAW {json.dumps([what, rank, value])}\n")


def use_at_any_depth(experiment: Any) -> None:
    experiment.config.update({"only": "here"})
    experiment.summary["best"].deeper["still"] = 0.9
    experiment.log({"lost": 1.0})
    experiment.log_artifact("a").wait().name.split(":")
    experiment.define_metric("loss", summary="min")
    assert isinstance(experiment, DummyExperiment)
    assert experiment.something(foo="bar") is None
    assert not experiment


class Model(Layer):
    def setup(self, stage: str) -> None:  # noqa: ARG002  # Lightning passes it
        assert isinstance(self.logger, DistWandbLogger)
        experiment = self.logger.experiment
        report(self.global_rank, "facts", {name: getattr(experiment, name) for name in FACTS + STATE})
        report(self.global_rank, "config", experiment.config["lr"])
        report(self.global_rank, "logger", [self.logger.name, self.logger.version, self.logger.save_dir])
        report(self.global_rank, "log_dir", self.trainer.log_dir)
        if self.global_rank:
            use_at_any_depth(experiment)
        else:
            experiment.name = "renamed"
        deadline = time.monotonic() + 20
        while experiment.name != "renamed" and time.monotonic() < deadline:
            time.sleep(0.1)
        report(self.global_rank, "name later", experiment.name)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def use_artifacts(directory: Path, rank: int) -> None:
    """Find the checkpoint of the first run from a second one, on all ranks, and download it."""
    logger = DistWandbLogger(project="tests", id="second", save_dir=directory)
    used = logger.use_artifact("model-exp:latest", "model")
    report(rank, "used", bool(used) and [used.version, sorted(used.aliases), used.metadata["original_filename"]])
    shutil.rmtree(os.environ["WANDB_CACHE_DIR"], ignore_errors=True)  # what is downloaded comes from the server
    used.download(root=str(directory / "by-use"))
    path = logger.download_artifact("model-exp:v0", directory / "by-name", "model", use_artifact=True)
    report(rank, "downloaded", path and DistWandbLogger.id_in(Path(path) / "model.ckpt"))
    logger.experiment.finish()
    path = DistWandbLogger.download_artifact("tests/model-exp:best", directory / "by-api", "model")
    report(rank, "downloaded without a run", path and sorted(file.name for file in Path(path).iterdir()))


def use_as_stock(into: str) -> None:
    """Lightning's ddp: print what the stock logger offers, and what each of two ranks knows of the one run."""
    directory = Path(into)
    logger = DistWandbLogger(
        "night",
        directory,
        "exp",
        project="tests",
        log_model=True,
        group="g",
        job_type="train",
        tags=["a", "b"],
        notes="n",
        config={"lr": 0.1},
        limits=Limits(heartbeat=0.2),
    )
    report(int(os.environ.get("LOCAL_RANK", "0")), "version before", logger.version)
    trainer = trainer_of_two(logger, max_epochs=2, enable_checkpointing=True)
    trainer.fit(Model(), samples(4))
    report(trainer.global_rank, "checkpoints", getattr(trainer.checkpoint_callback, "dirpath", None))
    report(trainer.global_rank, "log_dir later", trainer.log_dir)
    logger.experiment.finish()
    use_artifacts(directory, trainer.global_rank)
    changed = {name for name in os.environ.keys() | BEFORE.keys() if os.environ.get(name) != BEFORE.get(name)}
    report(trainer.global_rank, "changed", sorted(name for name in changed if "WANDB" in name))


def test_both_ranks_know_the_run_and_its_checkpoint_is_downloaded(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = python(use_as_stock, tmp_path)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    assert not [line for line in finished.output.splitlines() if line.startswith("wandb: WARNING")]
    assert not [word for word in STALE if word in finished.output]
    told = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    told.sort(key=lambda one: (one[0], one[1]))  # in rank order
    reports = {what: [value for name, _, value in told if name == what] for what, *_ in told}
    place = f"{wandb_server.url}/tester/tests"
    first, second = reports["facts"]
    assert first == second
    described = {"group": "g", "job_type": "train", "tags": ["a", "b"], "notes": "n", "offline": False}
    named = {"id": "exp", "name": "night", "url": f"{place}/runs/exp", "project_url": place, "path": "tester/tests/exp"}
    owned = {"entity": "tester", "project": "tests", "disabled": False, "resumed": False, "sweep_id": None}
    assert {**described, **named, **owned}.items() <= first.items()
    assert Path(first["dir"]).is_relative_to(tmp_path / "wandb")
    expected: dict[str, list[Any]] = {
        "config": [0.1, 0.1],
        "version before": ["exp", "exp"],
        "logger": [["tests", "exp", str(tmp_path)]] * 2,
        "log_dir": [str(tmp_path)] * 2,
        "log_dir later": [str(tmp_path)] * 2,
        "checkpoints": [str(tmp_path / "tests" / "exp" / "checkpoints")] * 2,
        "name later": ["renamed", "renamed"],
        "used": [["v0", ["best", "latest"], "epoch=1-step=4.ckpt"], False],
        "downloaded": ["exp", None],
        "downloaded without a run": [["model.ckpt"], None],
        "changed": [["WANDB_SERVICE"], []],  # set by wandb on the rank that used it
    }
    assert {what: reports[what] for what in expected} == expected
    (artifact,) = wandb_server.artifacts
    assert (artifact.kind, artifact.used_by) == ("model", ["tester/tests/second"] * 2)
    for way in ("by-use", "by-name", "by-api"):
        assert (tmp_path / way / "model.ckpt").read_bytes() == artifact.files["model.ckpt"]
