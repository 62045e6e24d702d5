"""One rank that ends as its arguments specify, without a barrier before: only dist_wandb waits for other ranks."""

import contextlib
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from wandb.sdk.lib.run_stopping import RunStopChecker

import dist_wandb
from dist_wandb.settings.plan import RUN_MODES, check_choice


def log_on(run: dist_wandb.Session) -> None:
    """Log until three seconds after the other rank was stopped."""
    until = math.inf
    while time.monotonic() < until:
        run.log({"own-1": 1.0})
        time.sleep(0.1)
        if Path("stopped").exists():
            until = min(until, time.monotonic() + 3.0)


def end(how: str, run: dist_wandb.Session) -> None:
    if how == "raises":
        raise RuntimeError("training failed")
    if how == "exits with 3":
        sys.exit(3)
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is terminated":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "is stopped":  # by W&B, which interrupts the main thread
        try:
            time.sleep(120)
        finally:
            Path("stopped").touch()
    if how == "logs on":
        log_on(run)
    if how == "is late":
        time.sleep(1.5)
    if how == "destroys the group":
        dist.destroy_process_group()


def main(directory: str, run_mode: str, *ends: str) -> None:
    """Each rank ends as given in `ends`; with " at last" in it, it never calls `finish`."""
    checker: Any = RunStopChecker.__init__
    checker.__kwdefaults__["poll_interval"] = 0.5  # seconds, of 15
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    how, at_last, _ = ends[rank].partition(" at last")
    run = dist_wandb.init(
        "tests",
        run_mode=check_choice("run_mode", run_mode, RUN_MODES),
        id="exp",
        dir=directory,
        limits=dist_wandb.Limits(peer_timeout=20.0, finish_timeout=25.0, heartbeat=0.2),
    )
    for step in range(5):
        run.log({"loss": 2.0 * step + rank}, step=step)
    run.flush()
    dist.barrier()
    with contextlib.nullcontext() if at_last else run:
        end(how, run)
        run.log({f"own-{rank}": 1.0}, step=5)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored
    main(*sys.argv[1:])
