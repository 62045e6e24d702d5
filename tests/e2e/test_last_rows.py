"""What `log` has accepted is in the file at the end, right or marked; or a message has the number of lost rows."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist
from history import histories, history_of
from processes import Finished, rank_commands, run_job
from stored import ended_runs

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


def risk_last_rows(directory: str, kind: str) -> None:
    """Two ranks whose last rows are at risk: `kind` is how."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it as ignored
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


def play(directory: Path, kind: str) -> tuple[list[int], dict[int, float], dict[int, int], int | None, Finished]:
    """Return the steps of the rows, the loss and the flag by step, the exit code of the run, and the job."""
    commands = rank_commands(risk_last_rows, directory / "runs", kind, world_size=2)
    finished = run_job(*commands, cwd=directory)
    (run,) = ended_runs(directory / "runs", 1)
    found = history_of(run)
    return [row["global_step"] for row in found.rows], found.last("loss"), found.flags("loss"), run.exit_code, finished


def test_a_second_ctrl_c_gives_up_the_last_rows_and_says_so(tmp_path: Path) -> None:
    steps, _, _, code, finished = play(tmp_path, "interrupted")
    assert finished.exit_codes == (-signal.SIGINT, 0), finished.output
    lost = int(re.findall(r"about (\d+) rows of rank 0 are lost: writing them was interrupted", finished.output)[0])
    assert steps == list(range(len(steps)))
    assert abs(len(steps) + lost - ROWS) <= 5
    assert code == 255


def test_rows_of_a_signal_handler_and_of_atexit_are_whole(tmp_path: Path) -> None:
    steps, loss, flags, code, finished = play(tmp_path, "handlers")
    finished.check()
    assert steps == list(range(ROWS + 2))
    assert [loss[step] for step in (ROWS - 2, ROWS, ROWS + 1)] == [1.0, 0.5, 0.5]
    assert (set(flags.values()), code) == ({0}, 0)
    assert not re.search("lost|flagged|failed|without", finished.output), finished.output


def test_rows_are_whole_if_all_ranks_raise_before_the_run_is_open(tmp_path: Path) -> None:
    steps, loss, flags, code, finished = play(tmp_path, "early")
    assert (finished.exit_codes, code) == ((1, 1), 1), finished.output
    assert (steps, loss) == ([0, 1, 2], dict.fromkeys(range(3), 0.5))
    assert set(flags.values()) == {0}
    assert "Rank 1 failed" not in finished.output


def test_the_last_row_of_a_label_without_the_users_axis_is_written_if_rank_0_finishes_later(tmp_path: Path) -> None:
    run_job(*rank_commands(risk_last_rows, tmp_path, "shared", world_size=2), cwd=tmp_path).check()
    rows = histories(tmp_path, 2)[1]
    assert rows.last("rank-1/loss") == dict.fromkeys(range(3), 1.0)
    assert all("rank-1/size" in row for row in rows.rows_with("rank-1/loss"))  # calls of one step are one row
