"""One of three ranks is stopped in the middle of training, and continued when the others have gone on without it."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from history import AFTER_BREAK, BREAK, FLUSHED, REJOINED
from processes import wait_until
from pulse import Pulse

import dist_wandb

VICTIM = 1
PEER_TIMEOUT = 6.0
GROUP_ANEW = 15.0  # seconds, generously: the remaining ranks agree to continue without it
PULSE = Pulse()


def log_ones(run: dist_wandb.Session, steps: range, pause: float = 0.0) -> None:
    slowest = 0.0
    for step in steps:
        begin = time.monotonic()
        run.log({"ones": 1, "mean": float(step)}, step=step)
        slowest = max(slowest, PULSE.own(begin, time.monotonic()))
        time.sleep(pause)
    assert slowest < PEER_TIMEOUT / 2, f"a call of log took {slowest} s"


def train_together(run: dist_wandb.Session, rank: int) -> None:
    """Train while all ranks are alive; everything logged here is known to all."""
    for step in range(FLUSHED):
        gradient = torch.full((10,), float(10**rank))
        dist.all_reduce(gradient)
        assert set(gradient.tolist()) == {111.0}
        log_ones(run, range(step, step + 1))
    assert run.flush(timeout=20)
    dist.barrier()  # the last collective: the default group cannot be used after a rank of it is gone


def go_on(run: dist_wandb.Session) -> None:
    all_were_there = time.monotonic()
    log_ones(run, range(FLUSHED, AFTER_BREAK), pause=0.02)
    begin = time.monotonic()
    is_flushed, end = run.flush(timeout=1), time.monotonic()
    if end - all_were_there < PEER_TIMEOUT:  # otherwise the rank may be considered lost
        assert not is_flushed, "flush did not wait for the rank that does not answer"
        assert end - begin > 0.9, f"flush(timeout=1) took {end - begin} s"
    assert end - begin < 20, f"flush(timeout=1) took {end - begin} s"
    assert run.flush(timeout=PEER_TIMEOUT + GROUP_ANEW), "the remaining ranks did not continue in time"


def see(file: Path) -> None:
    wait_until(file.exists, within=40, what=file.name)


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    marks = Path(directory)
    limits = dist_wandb.Limits(peer_timeout=PEER_TIMEOUT, heartbeat=2.0)
    with dist_wandb.init("tests", id="exp", dir=str(marks / "runs"), reduce={"ones": "sum"}, limits=limits) as run:
        train_together(run, rank)
        if rank == VICTIM:
            (marks / "victim").write_text(str(os.getpid()))
            log_ones(run, range(FLUSHED, BREAK), pause=0.02)
            os.kill(os.getpid(), signal.SIGSTOP)
            log_ones(run, range(BREAK, AFTER_BREAK))
            assert run.flush(timeout=30), "the rank was not readmitted"
            (marks / "rejoined").touch()
        else:
            go_on(run)
        if rank == 0:
            os.kill(int((marks / "victim").read_text()), signal.SIGCONT)
        see(marks / "rejoined")
        log_ones(run, range(AFTER_BREAK, REJOINED))
        begin = time.monotonic()
    took = time.monotonic() - begin
    assert took < 25, f"finish took {took} s"  # finish_timeout is 60 s
    (marks / f"ended-{rank}").touch()
    if rank == 0:  # it hosts the store for the others' last messages
        for other in (1, 2):
            see(marks / f"ended-{other}")


if __name__ == "__main__":
    main(*sys.argv[1:])
