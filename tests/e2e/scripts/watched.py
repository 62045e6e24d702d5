"""Watched gradients, each of which is the number of its step, in a run of its own for each kind and way of logging."""

import sys
from typing import Any

import torch
import torch.distributed as dist

ARGUMENTS: dict[str, dict[str, Any]] = {
    **{mode: {"run_mode": mode} for mode in ("auto", "shared", "new")},
    "unreduced": {"reduce": None},
}

if sys.argv[1] == "stock":
    import wandb as module
else:
    import dist_wandb as module  # type: ignore[no-redef]

    if sys.argv[1] != "alone":
        dist.init_process_group("gloo")
wandb: Any = module
for kind in sys.argv[1:]:
    for how in ("steps", "counted", "axis"):
        model = torch.nn.Linear(1, 1, bias=False)
        wandb.init(project="p", dir=f"{kind}/{how}", **ARGUMENTS.get(kind, {}))
        wandb.watch(model, log="gradients", log_freq=1)
        for step in range(1, 9):
            for _ in range(2):  # two backward passes for each call
                model.zero_grad()
                (model(torch.ones(1, 1)) * step).sum().backward()
            axis = {"global_step": step} if how == "axis" else {}
            wandb.log({"loss": float(step), **axis}, **({"step": step} if how == "steps" else {}))
        wandb.unwatch(model)
        wandb.finish()
