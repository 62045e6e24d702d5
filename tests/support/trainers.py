"""A small training with the Hugging Face Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **shape))


def trainer_with(
    *callbacks: Any, out: Path | str, kind: type[Trainer] = Trainer, examples: int = 8, **arguments: Any
) -> Trainer:
    trained = model()  # seeds what is random in the data, too
    data = [{"input_ids": torch.randint(0, 20, (4,)), "labels": index % 2} for index in range(examples)]
    given = {
        "use_cpu": True,
        "max_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "run_name": "tiny",
        "per_device_train_batch_size": 2,
        "disable_tqdm": True,
    }
    return kind(
        model=trained,
        args=TrainingArguments(str(out), **{**given, **arguments}),
        train_dataset=data,
        eval_dataset=data,
        callbacks=list(callbacks),
    )
