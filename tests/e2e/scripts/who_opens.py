"""Plain PyTorch on three ranks, of which some open a session, or open it late: `who_opens.py DIRECTORY`."""

import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import wandb
from history import STEPS
from processes import wait_until
from wandb.sdk.wandb_config import Config

import dist_wandb

SOON = 40.0  # seconds, on a busy machine; less than join_timeout


def late(directory: Path, rank: int) -> None:
    """Rank 0 opens its session after another rank has become the primary."""
    options: dict[str, Any] = {"id": "exp", "dir": str(directory), "limits": {"join_timeout": 2.0}}
    if rank:
        run = dist_wandb.init("tests", config={"of": rank}, **options)
        for step in range(STEPS):
            run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
        wait_until(lambda: bool(run.run) or rank != 1, within=SOON, what="a run")
    dist.barrier()
    if not rank:
        run = dist_wandb.init("tests", config={"of": rank}, **options)
    for step in range(STEPS, 2 * STEPS):
        run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    assert bool(run.run) == (rank == 1)
    assert (run.id, run.config["of"]) == ("exp", 1)
    run.finish()


def continued(directory: Path, rank: int) -> None:
    """Rank 1, the only one with a session, begins to write; rows have no steps."""
    if rank != 1:
        return
    limits = {"join_timeout": 2.0}
    run = dist_wandb.init("tests", id="exp", dir=str(directory), config={"lr": 0.1}, limits=limits)
    run.define_metric("loss", summary="max")
    for step in range(STEPS):
        run.log({"loss": float(-step), "again": step})
    run.summary["best"] = 0.5
    run.summary["again"] = -1
    run.config.update({"written": rank})
    run.log({"best": 0.25})
    update: Any = Config.update

    def slow_update(*args: Any, **arguments: Any) -> Any:  # of what was written so far, in the run that is opened
        time.sleep(1.0)
        return update(*args, **arguments)

    Config.update = slow_update  # type: ignore[method-assign]
    wait_until(lambda: wandb.run is not None, within=SOON, what="wandb's run")
    wandb.log({"beside": 1.0})
    wait_until(lambda: bool(run.run), within=SOON, what="a run")
    Config.update = update  # type: ignore[method-assign]
    run.summary["after"] = 2
    run.log({"loss": float(-STEPS)})
    run.flush()
    assert dict(run.summary["loss"]) == {"max": 0}
    run.finish()


def ends(directory: Path, rank: int, **options: Any) -> None:
    """Ranks 1 and 2 end before `join_timeout`, without rank 0."""
    began = time.monotonic()
    run = dist_wandb.init("tests", id="exp", dir=str(directory), **options)
    for step in range(STEPS):
        run.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    run.finish(0)
    assert time.monotonic() - began < SOON


def nested(directory: Path, rank: int) -> None:
    """Ranks 1 and 2 end a session while the run of the enclosing one is still opened on rank 0."""
    options: dict[str, Any] = {"dir": str(directory)}
    init = wandb.init

    def slow_init(*args: Any, **arguments: Any) -> Any:
        time.sleep(0.0 if rank else 4.0)
        return init(*args, **arguments)

    wandb.init = slow_init
    run = dist_wandb.init("tests", id="outer", **options)
    wandb.init = init
    time.sleep(0.0 if rank else 0.5)  # since the others have seen that it is open
    inner = dist_wandb.init("tests", id="exp", reinit="create_new", **options)
    for step in range(STEPS):
        inner.log({"loss": float(rank + step), "text": str(rank)}, step=step)
    inner.finish()
    run.finish()


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank, into = dist.get_rank(), Path(directory)
    late(into / "late", rank)
    dist.barrier()
    nested(into / "nested", rank)
    for kind, options in (("", {}), ("-alone", {"reduce": None})):
        dist.barrier()  # a rank that opens its session after the others have ended theirs is not the lowest
        if rank:
            ends(into / f"ends{kind}", rank, **options)
    continued(into / "continued", rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
