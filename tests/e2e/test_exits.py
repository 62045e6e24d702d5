"""A session's thread never disturbs the exit of scripts without `finish`."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import wandb  # noqa: F401  # before the forks, because it is slow
from history import history
from processes import Finished, free_port, python, run_job

import dist_wandb

NATIVE_FAILURES = (
    *("terminate called", "Aborted", "Fatal Python error", "Segmentation fault", "core dumped"),
    *("_enter_buffered_busy", "Exception ignored", "pure virtual method"),
)

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


def end_without_finish(directory: str, *kinds: str) -> None:
    """Ranks that end in several ways without `finish`; each prints nothing, and ends as Python would.

    This process imports everything once. For each way it forks two ranks, which use a separate store, log, and return
    like a separate script: through the shutdown of the interpreter. Every other way has a store over TCP.
    """
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


def interrupt_fit(directory: str) -> None:
    """Lightning: Ctrl-C on both ranks in the first seconds of a training whose second rank the Trainer has started."""
    from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
    from lightning_trainers import Layer, samples, trainer_of_two

    class Interrupted(Layer):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx == 3:
                raise KeyboardInterrupt
            self.log("loss", 2.0 * self.global_rank)
            return super().training_step(batch, batch_idx)

    observer: Any = _ChildProcessObserver.__init__
    observer.__defaults__ = (1,)  # seconds, of 5, until the Trainer kills the first rank after the second one
    logger = dist_wandb.DistWandbLogger(project="tests", save_dir=directory)
    trainer_of_two(logger).fit(Interrupted(), samples(20))


def check_quiet(finished: Finished) -> None:
    """Check that neither native code nor Python's shutdown has reported an error."""
    complaints = [text for text in NATIVE_FAILURES if text in finished.output]
    assert complaints == [], finished.output


CODES = {
    "normal": [0, 0],
    "guarded": [0, 0],
    "destroyed": [0, 0],
    "exception": [1, 1],
    "sys_exit": [3, 3],
    "ctrl_c": [-2, -2],
    "early_ctrl_c": [-2, -2],
    "one_fails": [0, 1],
}


@pytest.mark.cold  # a forked child's exit is shorter
def test_scripts_without_finish_always_keep_their_own_exit_codes(tmp_path: Path) -> None:
    finished = run_job(*python(end_without_finish, tmp_path, *CODES), cwd=tmp_path).check()
    expected = sorted(f"CODES {kind} {codes}" for kind, codes in CODES.items())
    assert finished.lines("CODES ") == expected, finished.output
    check_quiet(finished)


@pytest.mark.cold  # Python forgets a Ctrl-C if a module with a dataclass is imported for the first time after it
def test_a_process_with_a_run_on_disk_ends_by_ctrl_c_as_without_a_run(tmp_path: Path) -> None:
    code = "import dist_wandb; dist_wandb.init('tests', mode='offline').log({'loss': 1.0}); raise KeyboardInterrupt"
    finished = run_job([sys.executable, "-c", code], cwd=tmp_path)
    assert finished.exit_codes == (-signal.SIGINT,), finished.output
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [255]


def test_ctrl_c_in_a_training_of_lightning_ends_the_run_before_the_trainer_kills_the_ranks(tmp_path: Path) -> None:
    finished = run_job(*python(interrupt_fit, tmp_path), cwd=tmp_path)
    assert "Detected KeyboardInterrupt" in finished.output
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [1], finished.output
    assert history(tmp_path).values("loss") == [1.0] * 3, finished.output
    assert not history(tmp_path).is_flagged
