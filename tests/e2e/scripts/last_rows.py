"""Two ranks whose last rows are at risk: `kind` is how."""

import atexit
import logging
import os
import signal
import sys
import threading
import time

import torch.distributed as dist

import dist_wandb
from dist_wandb.runs.writer import RunWriter
from dist_wandb.session.opener import SessionOpener

ROWS = 400
SLOW = 0.01  # seconds that W&B takes for a row


class Interrupt(logging.StreamHandler):  # type: ignore[type-arg]
    """Presses Ctrl-C a second time, some time after the message that asks for it."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if "Press Ctrl-C again" in record.getMessage():
            press_later()


def press_later() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def slow_down() -> None:
    write = RunWriter.write

    def slow(*arguments: object, **named: object) -> None:
        time.sleep(SLOW)
        write(*arguments, **named)  # type: ignore[arg-type]

    RunWriter.write = slow  # type: ignore[method-assign]


def open_slowly() -> None:
    """Let the run be opened later than others wait for a rank that fails."""
    open_run = SessionOpener.assemble

    def slow(*arguments: object, **named: object) -> object:
        dist.barrier()
        time.sleep(2.5)
        return open_run(*arguments, **named)  # type: ignore[arg-type]

    SessionOpener.assemble = slow  # type: ignore[assignment]


def end_soon(run: dist_wandb.Session, rank: int) -> None:
    """Raise before the run is open, or finish a shared run before rank 0 does."""
    is_shared = run.plan.shared
    if rank and not is_shared:
        dist.barrier()
    run.define_metric("val/*", step_metric="epoch")
    for step in range(3):
        run.log({"loss": float(rank)}, step=step)
        run.log({"size": 2.0}, step=step)
    if not is_shared:
        raise RuntimeError("no data")
    time.sleep(0.0 if rank else 1.0)
    run.finish()


def main(directory: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if kind == "early" and rank == 0:
        open_slowly()
    limits = dist_wandb.Limits(finish_timeout=0.5 if kind == "interrupted" else 60.0)
    run = dist_wandb.init(
        "tests", id="exp", dir=directory, limits=limits, run_mode="shared" if kind == "shared" else "auto"
    )
    if kind in ("early", "shared"):
        end_soon(run, rank)
        return
    run.log({"loss": 1.0}, step=0)
    run.flush(30.0, together=True)
    dist.barrier()
    if kind == "interrupted":
        slow_down()
    for step in range(1, ROWS):
        run.log({"loss": 1.0}, step=step)
    if kind == "handlers":

        def on_sigterm(*_: object) -> None:
            run.log({"loss": float(rank)}, step=ROWS)
            sys.exit(0)

        signal.signal(signal.SIGTERM, on_sigterm)
        atexit.register(lambda: run.log({"loss": float(rank), **({} if rank else {"alone": 1.0})}, step=ROWS + 1))
        os.kill(os.getpid(), signal.SIGTERM)
    if kind == "interrupted" and rank == 0:
        logging.getLogger("dist_wandb").addHandler(Interrupt())
        press_later()
    run.finish()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it as ignored
    main(*sys.argv[1:])
