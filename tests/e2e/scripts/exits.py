"""Ranks that end in several ways without `finish`; each prints nothing, and ends as Python would.

This process imports everything once. For each way it forks two ranks, which use a separate store, log, and leave `main`
like a separate script: through the shutdown of the interpreter. Every other way has a store over TCP, the rest a file.
"""

import gc
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import wandb  # noqa: F401  # before the forks, because it is slow
from processes import free_port

import dist_wandb

ROWS = 20
AT_ONCE = 4  # concurrent pairs of ranks


def rank_logs(kind: str, rank: int, meeting: str) -> dist_wandb.Session:
    limit = timedelta(seconds=40)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
    run = dist_wandb.init("tests", id="exp", mode="disabled")
    for step in range(1 if kind == "early_ctrl_c" else ROWS):
        gradient = torch.ones(4)
        dist.all_reduce(gradient)
        assert gradient.tolist() == [2.0] * 4
        run.log({"loss": float(step), f"own_{rank}": 1.0})
        if kind == "guarded" and rank == 0:
            run.log({"guarded": 1.0})
    return run


def end(kind: str, rank: int, run: dist_wandb.Session, ready: int) -> None:
    os.write(ready, b"1")
    if kind == "ctrl_c" or (kind == "one_fails" and rank == 0):
        stop_at = time.monotonic() + (30 if kind == "ctrl_c" else 0.5)
        while time.monotonic() < stop_at:  # SIGINT arrives here
            run.log({"loss": 1.0})
            time.sleep(0.001)
        assert kind != "ctrl_c", "SIGINT did not arrive"
        return
    if kind == "early_ctrl_c":  # before the exchange's thread has formed a group
        raise KeyboardInterrupt
    time.sleep(random.random() * 0.1)  # ranks end in any order
    if kind in ("exception", "one_fails"):
        raise RuntimeError("training failed")
    if kind == "sys_exit":
        sys.exit(3)
    if kind == "destroyed":
        dist.destroy_process_group()


def fork_ranks(kind: str, number: int, directory: Path) -> tuple[list[int], int] | None:
    """Start two ranks. Return their ids and the pipe that signals readiness; `None` in a rank that should end now."""
    # A file store does not detect a lost rank: the other waits for it in native code, for ten seconds.
    over_tcp = number % 2 == 0 or kind == "early_ctrl_c"
    meeting = f"tcp://127.0.0.1:{free_port()}" if over_tcp else f"file://{directory / f'{kind}-{number}'}"
    read_end, write_end = os.pipe()
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            end(kind, rank, rank_logs(kind, rank, meeting), write_end)
            return None
        children.append(child)
    os.close(write_end)
    return children, read_end


def interrupt_when_ready(children: list[int], read_end: int) -> None:
    received = b""
    while len(received) < len(children):
        data = os.read(read_end, 2)
        assert data, "a rank ended before it was interrupted"
        received += data
    time.sleep(random.random() * 0.1)  # at any point of their loop
    for child in children:
        os.kill(child, signal.SIGINT)


def main(directory: str, *kinds: str) -> None:
    # A shell's background job, as in CI, starts with SIGINT ignored, and Python keeps it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # exempt imported objects from collection, which saves a third of the time of an exit
    waiting = list(enumerate(kinds))
    for begin in range(0, len(waiting), AT_ONCE):
        under_way = []
        for number, kind in waiting[begin : begin + AT_ONCE]:
            forked = fork_ranks(kind, number, Path(directory))
            if forked is None:
                return
            under_way.append((kind, *forked))
        for kind, children, read_end in under_way:
            if kind == "ctrl_c":
                interrupt_when_ready(children, read_end)
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            os.close(read_end)
            sys.stdout.write(f"\nCODES {kind} {codes}\n")
            sys.stdout.flush()  # before the next forks


if __name__ == "__main__":
    main(*sys.argv[1:])
