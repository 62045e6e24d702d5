"""Fixed trainings with the Hugging Face Trainer, by its own callback or by ours: WHICH DIRECTORY."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
NAMES = ("cadences", "own")
EXAMPLES = 8  # of a rank and an epoch; all are equal, so that all ranks have equal batches


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(x)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


class Own(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
    """Logs something itself, and is late on rank 1."""

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == 2 and RANK == 1:
            time.sleep(0.15)
        self._wandb.log({"own": state.global_step / 2, "note": "text", "train/global_step": state.global_step})
        if state.global_step == 3:
            self._wandb.run.summary["best"] = 0.25


def main(which: str, directory: str) -> None:
    callbacks: list[Any] = []
    if which == "stock":
        import wandb
    else:
        import dist_wandb as wandb  # type: ignore[no-redef]
        from dist_wandb import DistWandbCallback
    os.environ["WANDB_DIR"] = directory
    for name in NAMES:
        os.environ["WANDB_RUN_ID"] = name
        torch.manual_seed(0)
        arguments = TrainingArguments(
            str(Path(directory) / f"out-{name}"),
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            logging_steps=2 if name == "cadences" else 1,
            eval_strategy="epoch" if name == "cadences" else "steps",
            eval_steps=2,
            save_strategy="no",
            report_to="wandb" if which == "stock" else "none",
            run_name=name,
            disable_tqdm=True,
        )
        callbacks = [] if which == "stock" else [DistWandbCallback()]
        if name == "own":
            callbacks.append(Own(wandb))
        example = {"x": torch.tensor([0.5, 1.0]), "labels": torch.tensor([1.0])}
        data: Any = [example] * (EXAMPLES * WORLD_SIZE)
        trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
        trainer.train()
        trainer.evaluate()
        wandb.finish()
        if which == "stock":
            wandb.teardown()  # so that the next run gets its own id


if __name__ == "__main__":
    main(*sys.argv[1:])
