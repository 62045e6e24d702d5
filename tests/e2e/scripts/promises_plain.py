"""Plain PyTorch on two ranks: consecutive sessions, in each of which the ranks behave differently."""

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from history import BEHIND, LAG, MANY, STEPS
from processes import wait_until
from stored import PATIENT

import dist_wandb
from dist_wandb import Session

Scenario: TypeAlias = Callable[[Session, int], None]
THROUGH = Path("rank-0-is-through")  # a file
SCENARIOS: dict[str, tuple[dict[str, Any], Scenario]] = {}


def scenario(**options: Any) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        SCENARIOS[function.__name__] = options, function
        return function

    return register


@scenario()
def guarded_without_step(run: Session, rank: int) -> None:
    for step in range(STEPS):
        if rank == 0 and step % 3 == 0:
            run.log({"extra": float(step)})
        if rank == 1 and step % 2 == 0:
            run.log({"extra_on_1": float(step)})
        run.log({"loss": 2.0 * step + rank})


@scenario()
def behind(run: Session, rank: int) -> None:
    """Rank 0 is behind now and then, and logs one more name; the x axis is the user's."""
    run.define_metric("samples")
    run.define_metric("*", step_metric="samples")
    for step in range(BEHIND):
        time.sleep(0.01 + LAG * (rank == 0 and step % 7 == 3))
        own = {"lr": step / 8} if rank == 0 else {}
        run.log({"loss": 2.0 * step + rank, **own, "samples": 10 * step}, step=step)


@scenario(limits=dist_wandb.Limits(peer_timeout=60, heartbeat=1.0))
def sleeper(run: Session, rank: int) -> None:
    """Rank 1 sleeps for many heartbeats, but less than any limit, and until rank 0 has logged all its rows."""
    run.log({"loss": float(rank)}, step=0)
    assert run.flush(timeout=20)
    dist.barrier()
    if rank == 1:
        time.sleep(6.0)
        wait_until(THROUGH.exists, within=30, what="the end of rank 0's loop")
    for step in range(1, STEPS):
        run.log({"loss": 2.0 * step + rank, f"own_{rank}": 1.0}, step=step)
    if rank == 0:
        THROUGH.touch()


@scenario()
def many(run: Session, rank: int) -> None:
    for step in range(MANY):
        run.log({"loss": 2.0 * step + rank, "other": 1.0}, step=step)


def again_and_again(rank: int) -> None:
    """Open sessions in turn; report the resources of this process and the job's store after some and after more."""
    gc.disable()  # so that only objects freed by reference counting are released
    store = dist.distributed_c10d._get_default_store()
    held, keys = [], deque[int](maxlen=5)  # the last three sessions have 10 to 60 keys more
    for number in range(26):
        with dist_wandb.init(
            "tests", id=f"again-{number}", mode="disabled", limits=dist_wandb.Limits(heartbeat=0.05)
        ) as run:
            for step in range(3):
                run.log({"loss": float(step + rank)}, step=step)
        dist.barrier()  # a rank that is sessions behind needs their keys
        keys.append(store.num_keys())
        if number in (5, 25):
            wait_until(lambda: not [t for t in threading.enumerate() if "dist_wandb" in t.name], within=60, what="end")
            dist.barrier()
            open_files, threads = ([*Path(f"/proc/self/{what}").iterdir()] for what in ("fd", "task"))
            held.append((len(open_files), len(threads), min(keys)))
    gc.enable()
    sys.stdout.write(f"\nHELD {rank} {[after - before for before, after in zip(*held, strict=True)]}\n")


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, (options, function) in SCENARIOS.items():
        sys.stdout.write(f"\nBEGIN {name} on rank {rank}\n")
        into = str(Path(directory) / name)
        with dist_wandb.init("tests", id="exp", dir=into, **{"limits": {"heartbeat": PATIENT}, **options}) as run:
            function(run, rank)
        run.finish()  # to no effect
    again_and_again(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
