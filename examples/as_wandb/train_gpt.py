"""A character-level GPT in the style of nanoGPT's train.py. The only change is ``import dist_wandb as wandb``.

python train_gpt.py
torchrun --nproc_per_node 2 train_gpt.py
"""

import math
import os
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
eval_interval = 10
eval_iters = 4
log_interval = 10
# wandb logging
wandb_log = True
wandb_project = "gpt"
wandb_run_name = "mini-gpt"
# data
gradient_accumulation_steps = 2  # of all processes
batch_size = 8
block_size = 32
# model
n_layer = 1
n_head = 2
n_embd = 32
# adamw optimizer
learning_rate = 1e-2
max_iters = 40
# learning rate decay
warmup_iters = 5
min_lr = 1e-3
# -----------------------------------------------------------------------------
config = {k: v for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))}
# -----------------------------------------------------------------------------

ddp = int(os.environ.get("RANK", "-1")) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0  # this process will do logging, checkpointing etc.
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0  # noqa: S101
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1
torch.set_num_threads(1)
torch.manual_seed(1337 + seed_offset)

text = Path(textwrap.__file__).read_text(encoding="utf-8")  # a text that every Python has
vocabulary = sorted(set(text))
data = torch.tensor([vocabulary.index(character) for character in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    split_data = train_data if split == "train" else val_data
    ix = torch.randint(len(split_data) - block_size, (batch_size,))
    x = torch.stack([split_data[i : i + block_size] for i in ix])
    y = torch.stack([split_data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(vocabulary), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, len(vocabulary), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        x = self.blocks(x, mask=nn.Transformer.generate_square_subsequent_mask(idx.size(1)), is_causal=True)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    out = {}
    raw_model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            _, batch_loss = raw_model(*get_batch(split))
            losses[k] = batch_loss.item()
        out[split] = losses.mean()
    raw_model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    coeff = 0.5 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters)))
    return min_lr + coeff * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if ddp:
    model = DDP(model)
raw_model = model.module if ddp else model

# logging
if wandb_log and master_process:
    import dist_wandb as wandb

    wandb.init(project=wandb_project, name=wandb_run_name, config=config)

# training loop
X, Y = get_batch("train")
t0 = time.time()
for iter_num in range(max_iters + 1):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    # evaluate the loss on train/val sets
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if wandb_log:
            wandb.log(
                {
                    "iter": iter_num,
                    "train/loss": losses["train"],
                    "val/loss": losses["val"],
                    "lr": lr,
                }
            )

    # forward backward update
    for micro_step in range(gradient_accumulation_steps):
        with model.no_sync() if ddp and micro_step < gradient_accumulation_steps - 1 else nullcontext():
            _, loss = model(X, Y)
            (loss / gradient_accumulation_steps).backward()
        X, Y = get_batch("train")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(time.time() - t0) * 1000:.2f}ms")
        t0 = time.time()

if ddp:
    destroy_process_group()
