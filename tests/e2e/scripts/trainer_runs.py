"""A Trainer whose ranks also log their own number, in several trainings, each of which is a run: OUT."""

from __future__ import annotations

import sys
from typing import Any

import torch
import wandb
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import dist_wandb
from dist_wandb.transformers import DistWandbCallback


class OwnNumbers(Trainer):  # type: ignore[misc]  # transformers is not typed here
    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logs["mine"] = float(self.args.process_index)
        super().log(logs, *args, **kwargs)


def train(out: str, name: str, *callbacks: DistWandbCallback, report_to: str = "none") -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **shape))
    data = [{"input_ids": torch.randint(0, 20, (4,)), "labels": index % 2} for index in range(32)]
    arguments = TrainingArguments(
        out,
        use_cpu=True,
        max_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=report_to,
        run_name=name,
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    trainer = OwnNumbers(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))
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
