"""``wandb.agent`` in Python, which calls a function in a thread of this process for each trial."""

import sys
import time
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
import wandb
from wandb.agents import pyagent
from wandb.sdk.lib import run_stopping

import dist_wandb

AT_LEAST = 120.0  # seconds: a trial that is not stopped ends successfully, which is not expected


def alone() -> None:
    """One process, whose trials succeed, are never finished, fail, or are stopped."""
    run = dist_wandb.init("digits", config={"lr": 7.0})
    end = run.config["end"]
    sys.stdout.write(f"\nSAW {run.id} {end} lr={run.config['lr']}\n")
    run.log({"loss": 0.5})
    if end == "fails":
        raise ArithmeticError
    begin = time.monotonic()
    while end == "stopped" and time.monotonic() - begin < AT_LEAST:
        run.log({"loss": 0.5})
        time.sleep(0.1)
    if end == "finished":
        run.finish()


def spawned() -> None:
    """Spawned processes are the ranks."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn: Any = mp.spawn
    spawn(rank_of, (port.port,), nprocs=2)


def rank_of(rank: int, port: int) -> None:
    checker: Any = run_stopping.RunStopChecker.__init__
    checker.__kwdefaults__["poll_interval"] = 0.5  # seconds, of 15: how often a run checks whether it should stop
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with dist_wandb.init("digits", run_mode="shared", config={"lr": 7.0}) as run:
        end = run.config["end"]
        sys.stdout.write(f"\nSAW {rank} {run.id} {end} lr={run.config['lr']}\n")
        begin = time.monotonic()
        run.log({"loss": 0.5})
        dist.barrier()
        if end == "fails":
            raise ArithmeticError
        while end == "stopped" and time.monotonic() - begin < AT_LEAST:
            run.log({"loss": 0.5})
            time.sleep(0.1)


def main(how: str, *ends: str) -> None:
    agent: Any = pyagent.Agent
    agent.HEARTBEAT_SLEEP_SECONDS = 0.2  # of 5
    config = {"method": "grid", "parameters": {"end": {"values": [*ends]}, "lr": {"values": [0.5]}}}
    sweep = wandb.sweep(config, project="digits")
    wandb.agent(sweep, {"alone": alone, "spawned": spawned}[how], project="digits", count=len(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
