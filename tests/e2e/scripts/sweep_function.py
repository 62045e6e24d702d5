"""``wandb.agent`` in Python, which calls a function in a thread of this process for each trial."""

import sys
import time
from typing import Any

import wandb
from wandb.agents import pyagent

import dist_wandb

AT_LEAST = 120.0  # seconds: a trial that is not stopped ends successfully, which is not expected


def trial() -> None:
    """A trial that succeeds, is never finished, fails, or is stopped."""
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


def main(*ends: str) -> None:
    agent: Any = pyagent.Agent
    agent.HEARTBEAT_SLEEP_SECONDS = 0.2  # of 5
    config = {"method": "grid", "parameters": {"end": {"values": [*ends]}, "lr": {"values": [0.5]}}}
    sweep = wandb.sweep(config, project="digits")
    wandb.agent(sweep, trial, project="digits", count=len(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
