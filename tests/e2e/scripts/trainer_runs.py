"""A Trainer whose ranks also log their own number, in several trainings, each of which is a run: OUT."""

from __future__ import annotations

import sys
from typing import Any

import wandb
from trainers import trainer_with
from transformers import Trainer, TrainingArguments

import dist_wandb
from dist_wandb.transformers import DistWandbCallback


class OwnNumbers(Trainer):  # type: ignore[misc]  # transformers is not typed here
    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logs["mine"] = float(self.args.process_index)
        super().log(logs, *args, **kwargs)


def train(out: str, name: str, *callbacks: DistWandbCallback, report_to: str = "none") -> None:
    given = {"max_steps": 3, "run_name": name, "report_to": report_to}
    trainer = trainer_with(*callbacks, out=out, kind=OwnNumbers, examples=32, **given)
    trainer.train()
    trainer.evaluate()


def main(out: str) -> None:
    train(out, "name", report_to="dist_wandb")
    dist_wandb.finish()
    train(out, "sums", DistWandbCallback(run_mode="shared", reduce="sum"))
    dist_wandb.finish()
    train(out, "new", DistWandbCallback(run_mode="new"))
    dist_wandb.finish()
    rank = TrainingArguments(out, use_cpu=True).process_index
    if rank == 0:
        dist_wandb.init(id="of_session", name="guarded")
    train(out, "guarded", DistWandbCallback())
    dist_wandb.finish()
    if rank == 0:
        wandb.init(id="users", name="adopt")
    train(out, "adopt", DistWandbCallback())  # ends with the process


if __name__ == "__main__":
    main(*sys.argv[1:])
