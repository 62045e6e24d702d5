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
if dist.is_initialized():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded: Any = torch.nn.Sequential(torch.nn.Linear(1, 4, bias=False))
    with torch.no_grad():
        sharded[0].weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    for part in (sharded[0], sharded):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    wandb.init(project="p", dir="sharded")
    wandb.watch(sharded, log="all", log_freq=1)
    sharded(torch.ones(1, 1)).sum().backward()
    wandb.log({"loss": 1.0})
    wandb.finish()
