"""One rank of a job on several hosts whose groups have as many members as a host has ranks: they form a tree.

It logs at the same pace as all other ranks, until the test announces the last step of its host. The training
uses no collectives. With an address and a port, it hosts the job's store there, like torchrun's agent.
"""

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

import dist_wandb
from dist_wandb.exchange import transport as groups

PACE, BEAT = 0.1, 0.02  # seconds
LIMITS = dist_wandb.Limits(peer_timeout=4.0, join_timeout=60.0, finish_timeout=4.0, heartbeat=0.2)


class Pulse:
    """Detects when a busy machine has suspended the whole process, to find how long a call itself has waited."""

    def __init__(self) -> None:
        self._gaps: list[tuple[float, float]] = []  # begin and end of each suspension
        self._last = time.monotonic()
        threading.Thread(target=self._beat, daemon=True).start()

    def own(self, begin: float, end: float) -> float:
        """Return the seconds between two times of the monotonic clock in which the process was not suspended."""
        held_up = sum(max(0.0, min(end, to) - max(begin, since)) for since, to in [*self._gaps, (self._last, end)])
        return end - begin - held_up

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT)
            now = time.monotonic()
            if now - self._last > 5 * BEAT:
                self._gaps.append((self._last, now))
            self._last = now


PULSE = Pulse()


def take_part(directory: Path) -> None:
    logging.basicConfig(format="AT %(created).2f %(message)s")
    rank, slowest = int(os.environ["RANK"]), 0.0
    groups.FAN_OUT = int(os.environ["LOCAL_WORLD_SIZE"])
    run = dist_wandb.init("tests", id="job", dir=str(directory), limits=LIMITS, reduce={"who": "sum"})
    run.log({"loss": float(rank), "who": 2**rank}, step=0)
    assert run.flush(60.0)
    group = type(run._exchange.participation.group).__name__  # type: ignore[attr-defined]  # nothing public shows it
    (directory / f"begun-{rank}").write_text(str(os.getpid()))
    began, step = float(awaited(directory / "begin")), 0
    while step < last_step(directory):
        step += 1
        time.sleep(max(0.0, began + step * PACE - time.time()))
        before = time.monotonic()
        run.log({"loss": float(step + rank), "who": 2**rank}, step=step)
        slowest = max(slowest, PULSE.own(before, time.monotonic()))
    before = time.monotonic()
    run.finish()
    took = PULSE.own(before, time.monotonic())
    sys.stdout.write(f"\nENDED {json.dumps({'rank': rank, 'group': group, 'log': slowest, 'finish': took})}\n")


def keep_store(directory: Path, address: str, port: int) -> None:
    store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False)
    awaited(directory / "over")
    del store


def awaited(path: Path) -> str:
    """Wait until the test has written a file, and return its content."""
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def last_step(directory: Path) -> float:
    path = directory / f"until-{os.environ['GROUP_RANK']}"
    return int(path.read_text()) if path.exists() else float("inf")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        keep_store(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    else:
        take_part(Path(sys.argv[1]))
