"""A Trainer whose ranks also log their own number: MODE OUT [REDUCE]."""

from __future__ import annotations

import sys
from typing import Any

import torch
import wandb
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from dist_wandb.transformers import DistWandbCallback


class OwnNumbers(Trainer):  # type: ignore[misc]  # transformers is not typed here
    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        logs["mine"] = float(self.args.process_index)
        super().log(logs, *args, **kwargs)


def main(mode: str, out: str, reduce: str = "auto") -> None:
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
        report_to="dist_wandb" if mode == "name" else "none",
        run_name="tiny",
        per_device_train_batch_size=2,
        disable_tqdm=True,
    )
    if mode == "adopt" and arguments.process_index == 0:
        wandb.init(id="users")
    run_mode: Any = "auto" if mode == "adopt" else mode
    callbacks = [] if mode == "name" else [DistWandbCallback(run_mode=run_mode, reduce=reduce)]  # type: ignore[arg-type]
    trainer = OwnNumbers(model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)
    trainer.train()
    trainer.evaluate()


if __name__ == "__main__":
    main(*sys.argv[1:])
