"""Lightning ddp: `logger.experiment` is used before the Trainer has started its processes."""

import sys

import fit_and_test
from lightning_trainers import samples, trainer_of_two
from stored import PATIENT

from dist_wandb import DistWandbLogger, Limits


def main(directory: str) -> None:
    logger = DistWandbLogger(
        name="nm",
        save_dir=directory,
        project="tests",
        config={"bias": True},
        tags=["a"],
        group="g",
        job_type="train",
        offline=True,
        limits=Limits(heartbeat=PATIENT),
    )
    logger.experiment.config.update({"lr": 0.1})
    logger.log_hyperparams({"width": 8})
    run = logger.experiment
    about = [run.id, run.project, run.name, run.group, run.tags, run.job_type, run.path, run.dir]
    seen = [run.config["lr"], run.config.get("width", 1), bool(run.config["bias"]), run.config.get("depth", 3), *about]
    sys.stdout.write(f"EARLY {seen}\n")
    sys.stdout.flush()
    trainer_of_two(logger).fit(fit_and_test.Model(), samples(6))


if __name__ == "__main__":
    main(*sys.argv[1:])
