"""One process that opens a run for each name that it is given, one after the other, and logs a few rows to each."""

import sys

import wandb

import dist_wandb

ROWS = 3


def train(directory: str, name: str) -> None:
    """Log a few rows; under the name `large`, also one that is longer than W&B accepts. Two runs have short limits."""
    settings = wandb.Settings(init_timeout=4 if name == "id-deleted" else 60)
    limits = dist_wandb.Limits(finish_timeout=4.0 if name == "patience" else 60.0)
    with dist_wandb.init("tests", id=name, dir=directory, settings=settings, limits=limits) as run:
        for step in range(ROWS):
            run.log({"loss": float(step)}, step=step)
        if name == "large":
            run.log({"text": "x" * 11_000_000}, step=ROWS)
            run.log({"loss": float(ROWS)}, step=ROWS + 1)


def main(directory: str, *names: str) -> None:
    for name in names:
        try:
            train(directory, name)
        except wandb.Error as error:  # noqa: PERF203  # each run by itself
            sys.stdout.write(f"\nSAW {name} {type(error).__name__}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
