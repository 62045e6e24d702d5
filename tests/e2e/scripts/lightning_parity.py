"""Lightning's ddp: what the stock logger offers, and what each of two ranks knows of the one run, printed as JSON."""

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

from dist_wandb import DistWandbLogger, Limits

FACTS = ("id", "name", "url", "entity", "project", "project_url", "path", "group", "job_type", "tags", "notes")
STATE = ("dir", "start_time", "offline", "disabled", "resumed", "sweep_id")
BEFORE = dict(os.environ)


def report(rank: int, what: str, value: object) -> None:
    sys.stdout.write(f"\nSAW {json.dumps([what, rank, value])}\n")


def places(logger: DistWandbLogger) -> list[str | None]:
    return [logger.name, logger.version, logger.save_dir]


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
        report(self.global_rank, "logger", places(self.logger))
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


def main(directory: Path) -> None:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
