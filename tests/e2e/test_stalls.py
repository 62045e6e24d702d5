"""Jobs that stand still say which rank stands where; healthy ones say nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from processes import run_job, started, torchrun, wait_until
from wandb_server import WandbServer

import dist_wandb

LINES = Path(__file__).read_text(encoding="utf-8").splitlines()
TRAIN = next(number for number, line in enumerate(LINES, 1) if line.startswith("    model(torch.ones(2, 2))"))
LIMIT = 4.0  # seconds
FAR = 600  # seconds: longer than any job of a test
LIMITS = {"heartbeat": 0.5, "peer_timeout": 5, "join_timeout": 30, "finish_timeout": 5}


def stand_still(case: str, directory: str) -> None:
    """Train some steps, then do what the case does."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mode: Literal["online", "offline"] = "online" if "WANDB_BASE_URL" in os.environ else "offline"
    run = dist_wandb.init(mode=mode, dir=directory, stall_timeout=LIMIT, limits=LIMITS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in range(5):
        train(model)
        run.log({"loss": 0.5}, step=step)
    CASES[case](rank)
    train(model)
    run.finish()
    dist.destroy_process_group()


def train(model: Any) -> None:
    model(torch.ones(2, 2)).sum().backward()


def dataset(rank: int) -> None:
    if rank == 1:
        time.sleep(FAR)


def stop_rank(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def validation(rank: int) -> None:
    until = time.monotonic() + 1.6 * LIMIT  # it is told to be slow after three limits
    while rank == 0 and time.monotonic() < until:
        sum(range(10000))
    dist.barrier()


CASES: dict[str, Callable[[int], None]] = {one.__name__: one for one in (dataset, stop_rank, validation)}


def test_a_stopped_rank_that_the_others_wait_for_is_named(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with started(*torchrun(stand_still, "stop_rank", tmp_path, processes=3), cwd=tmp_path, output=output):
        wait_until(lambda: "All stacks are in" in output.read_text(encoding="utf-8"), 120, "the message")
        time.sleep(1.0)  # no other rank says it, too
        text = output.read_text(encoding="utf-8")
    (message,) = [line for line in text.splitlines() if "All stacks are in" in line]
    assert "Ranks 0, 2 wait in all_reduce" in message
    assert "rank 1 does not answer: its process is stopped. To see more:" in message
    stacks = re.search(r"All stacks are in (\S+)\. No process is ended; stall_timeout=None turns this off", message)
    (file,) = tmp_path.rglob("stall-*.txt")
    assert stacks is not None
    assert str(file) == stacks[1]
    assert file.parent.name == "files"  # of rank 0's run, whichever rank has told it


def test_a_stall_is_one_alert_of_an_online_run_that_names_the_rank_and_the_line(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    def alerts() -> list[Any]:
        sent = [request for request, _ in wandb_server.answered if request.operation == "NotifyScriptableRunAlert"]
        return [request.message["variables"] for request in sent]

    environment, output = wandb_server.environment(tmp_path), tmp_path / "output.txt"
    job = torchrun(stand_still, "dataset", tmp_path, processes=3)
    with started(*job, cwd=tmp_path, environment=environment, output=output):
        wandb_server.wait_until(lambda: bool(alerts()), within=120)
        time.sleep(2.0)  # no other rank sends one, too
    (alert,) = alerts()
    (run,) = wandb_server.runs.values()
    assert (alert["runName"], alert["severity"]) == (run.run_id, "WARN")
    assert f"Ranks 0, 2 wait in all_reduce (test_stalls.py:{TRAIN})" in alert["text"]
    assert re.search(r"rank 1 (is calling sleep|stands) at test_stalls.py:\d+,", alert["text"])
    (file,) = tmp_path.rglob("stall-*.txt")
    text = file.read_text(encoding="utf-8")
    assert text.splitlines()[1] == alert["text"]
    assert f'File "{__file__}", line ' in text


def test_a_long_validation_of_one_rank_is_no_stall(tmp_path: Path) -> None:
    job = run_job(*torchrun(stand_still, "validation", tmp_path, processes=2), cwd=tmp_path, timeout=120).check()
    assert "All stacks are in" not in job.output
    assert not list(tmp_path.rglob("stall-*.txt"))
