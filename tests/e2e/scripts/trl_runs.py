"""trl's GRPOTrainer with a model of a few numbers: OUT (stock | ours)."""

from __future__ import annotations

import sys
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from dist_wandb.transformers import DistWandbCallback

PAD, END = "<pad>", "<eos>"
WORDS = [PAD, END, *(f"w{number}" for number in range(16))]


def letters(completions: list[str], **_: Any) -> list[float]:
    """Reward the length of a text."""
    return [float(len(text)) for text in completions]


def main(out: str, which: str) -> None:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    arguments = GRPOConfig(
        out,
        use_cpu=True,
        bf16=False,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="wandb" if which == "stock" else "none",
        run_name="tiny",
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        log_completions=True,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **shape)),
        letters,
        arguments,
        Dataset.from_dict({"prompt": WORDS[2:10]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END),
        callbacks=[] if which == "stock" else [DistWandbCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
