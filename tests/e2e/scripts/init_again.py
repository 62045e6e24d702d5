"""Two ranks: a helper, on all ranks or one, calls `init` once more, in folds that only rank 0 finishes."""

import sys
import time
from typing import Any

import torch.distributed as dist

import dist_wandb as wandb

PROJECT: dict[str, Any] = {"project": "tests", "settings": {"silent": True}}


def evaluate(step: int) -> None:
    wandb.init(**PROJECT, name="ignored", config={"lr": 2}).log({"acc": float(dist.get_rank())}, step=step)


def refused(**arguments: Any) -> str:
    try:
        wandb.init(**PROJECT, **arguments)
    except (ValueError, wandb.Error) as error:
        return type(error).__name__
    return "accepted"


def train(name: str, who: str) -> None:
    """Train; the helper is called on all ranks, or on one. Rank 0 opens a run beside, too."""
    rank = dist.get_rank()
    for step in range(4):
        wandb.log({"loss": 1.0 + rank}, step=step)
        if step == 2 and who in ("all", str(rank)):
            begun = time.monotonic()
            evaluate(step)
            sys.stdout.write(f"HELPER {name} {rank} {time.monotonic() - begun:.3f}\n")
    if who == "0" and rank == 0:
        with wandb.init(**PROJECT, name="beside", config={"lr": 1}, reinit="create_new") as beside:
            beside.log({"acc": 1.0})
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for who in ("all", "0", "1"):
        wandb.init(**PROJECT, name=f"fold-{who}", config={"lr": 1})
        train(f"fold-{who}", who)
        if rank == 0:
            time.sleep(0.5)  # it saves a checkpoint: the other rank is ahead
            wandb.finish()
    wandb.init(**PROJECT, name="last", config={"lr": 1})
    train("last", "")
    sys.stdout.write(f"REFUSED {rank} {refused(mode='bogus')} {refused(config='missing.yaml')}\n")
    wandb.finish()
    for turn in range(2):  # without an end; rank 0 ends the run long before the other rank begins its second turn
        wandb.init(**PROJECT, name=f"turn-{turn}", config={"lr": 1})
        wandb.log({"loss": 1.0 + rank}, step=turn)
        time.sleep(rank)
    wandb.finish()
    for turn in range(2):  # rank 1 calls `init` again before rank 0 has opened the first one
        time.sleep(0.0 if rank else 1.0)
        wandb.init(**PROJECT, name=f"ahead-{turn}", config={"lr": 1})
        wandb.log({"loss": 1.0 + rank}, step=turn)
        if rank == 0:
            wandb.finish()
    wandb.finish()
    sys.stdout.write(f"AFTER {rank} {wandb.run}\n")
    if rank == 0:
        wandb.init(**PROJECT, name="alone", config={"lr": 1})
        evaluate(0)
        wandb.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
