"""A process whose own signal handler logs a thousand times a second, also while SIGTERM ends its run."""

import os
import signal
import sys
import time
from types import FrameType

from history import STEPS

import dist_wandb


def main(directory: str) -> None:
    run = dist_wandb.init("tests", id="exp", dir=directory)

    def handle(_number: int, _frame: FrameType | None) -> None:
        run.log({"tick": 1.0})

    for step in range(STEPS):
        run.log({"loss": float(step)})
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
