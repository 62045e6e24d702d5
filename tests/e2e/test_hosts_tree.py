"""Four hosts of four ranks each, whose groups form a tree: one host is cut off, then the leader of another is killed.

A leader is the first rank of a group; it connects the ranks of its host to the other hosts. The hosts are network
namespaces, or loopback: see `hosts`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest
import torch.distributed as dist
from history import History
from hosts import hosts, ranks_on
from processes import Job, clean_environment, free_port, started, wait_until, words_of
from pulse import Pulse
from stored import ended_runs, find_runs, read_history, rows_in

import dist_wandb
from dist_wandb.exchange import transport as groups

HOSTS, PER_HOST = 4, 4
RANKS = HOSTS * PER_HOST
CUT, KILLED = 3, 4  # a host, and the first rank of another one
ON_CUT = range(CUT * PER_HOST, (CUT + 1) * PER_HOST)
PACE, PEER, FINISH = 0.1, 4.0, 4.0  # seconds: between two rows, peer_timeout, finish_timeout
MORE = 20.0  # seconds beyond those, on a busy machine: less than any default limit
SOON = 120.0  # seconds within which an expected event must happen
LIMITS = dist_wandb.Limits(peer_timeout=PEER, join_timeout=60.0, finish_timeout=FINISH, heartbeat=0.2)


def take_part(into: str) -> None:
    """Log at the same pace as all other ranks, until the test announces the last step of this host."""
    directory = Path(into)
    pulse = Pulse()
    logging.basicConfig(format="AT %(created).2f %(message)s")
    rank, slowest = int(os.environ["RANK"]), 0.0
    groups.FAN_OUT = int(os.environ["LOCAL_WORLD_SIZE"])
    run = dist_wandb.init("tests", id="job", dir=str(directory), limits=LIMITS, reduce={"who": "sum"})
    run.log({"loss": float(rank), "who": 2**rank}, step=0)
    assert run.flush(60.0)
    group = type(run._exchange.group).__name__  # type: ignore[attr-defined]  # nothing public shows it
    (directory / f"begun-{rank}").write_text(str(os.getpid()))
    began, step = float(awaited(directory / "begin")), 0
    while step < last_step(directory):
        step += 1
        time.sleep(max(0.0, began + step * PACE - time.time()))
        before = time.monotonic()
        run.log({"loss": float(step + rank), "who": 2**rank}, step=step)
        slowest = max(slowest, pulse.own(before, time.monotonic()))
    before = time.monotonic()
    run.finish()
    took = pulse.own(before, time.monotonic())
    sys.stdout.write(f"\nENDED {json.dumps({'rank': rank, 'group': group, 'log': slowest, 'finish': took})}\n")


def keep_store(directory: str, address: str, port: str) -> None:
    """Host the job's store, like torchrun's agent."""
    store = dist.TCPStore(address, int(port), is_master=True, wait_for_workers=False)
    awaited(Path(directory) / "over")
    del store


def awaited(path: Path) -> str:
    """Wait until the test has written a file, and return its content."""
    while not path.exists():
        time.sleep(0.05)
    return path.read_text()


def last_step(directory: Path) -> float:
    path = directory / f"until-{os.environ['GROUP_RANK']}"
    return int(path.read_text()) if path.exists() else float("inf")


@dataclass
class Training:
    """The job, as controlled by the test."""

    directory: Path  # directory of the ranks' messages
    job: Job  # the processes, by rank; the last one hosts the store
    began: float = 0.0  # time at which the ranks began to log

    def begin(self) -> None:
        """Let the ranks begin to log after they have joined."""
        pids = [self.directory / f"begun-{rank}" for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in pids), SOON)
        self.began = time.time()
        self.send("begin", self.began)

    def send(self, what: str, value: object = "") -> None:
        """Send a message to the ranks, by a file."""
        unfinished = self.directory / f"{what}.tmp"
        unfinished.write_text(str(value))
        unfinished.rename(self.directory / what)

    def await_row(self, ranks: frozenset[int]) -> None:
        """Wait until a row of exactly these ranks is on disk."""
        (run,) = find_runs(self.directory)
        wait_until(lambda: any(members(row.get("who", 0)) == ranks for row in rows_in(run)), SOON)

    def end_soon(self, *on: int) -> int:
        """Let the ranks of some hosts end in five seconds; return their last step, which none has reached yet."""
        until = int((time.time() + 5 - self.began) / PACE)
        for host in on:
            self.send(f"until-{host}", until)
        return until

    def kill(self, rank: int) -> None:
        os.kill(int((self.directory / f"begun-{rank}").read_text()), signal.SIGKILL)

    def await_end(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.job.processes[rank].wait(SOON)


def members(who: float) -> frozenset[int]:
    """Return the ranks in a sum of powers of two."""
    return frozenset(rank for rank in range(RANKS) if int(who) >> rank & 1)


@pytest.mark.alone  # on a busy machine, its limits are so short that neighbours would count as lost
def test_others_continue_without_a_host_and_the_leader_of_another(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    everybody = frozenset(range(RANKS))
    reached = everybody - set(ON_CUT)
    survivors = reached - {KILLED}
    output = tmp_path / "output"
    environment = clean_environment(WANDB_SILENT="true")
    with hosts(HOSTS) as made, contextlib.ExitStack() as stack:
        record_testsuite_property("hosts in a tree", made.why_loopback or "network namespaces")
        port = free_port()
        store = made.on(0, sys.executable, *words_of(keep_store, tmp_path, made.addresses[0], port))
        torchrun = {
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        commands = [*ranks_on(made, take_part, tmp_path, per_host=PER_HOST, MASTER_PORT=port, **torchrun), store]
        job = stack.enter_context(started(*commands, cwd=tmp_path, environment=environment, output=output))
        training = Training(tmp_path, job)
        training.begin()
        training.await_row(everybody)
        made.cut(CUT)
        cut = time.time()
        training.await_row(reached)
        training.end_soon(CUT)
        training.kill(KILLED)
        killed = time.time()
        training.await_row(survivors)
        until = training.end_soon(*(host for host in range(HOSTS) if host != CUT))
        training.await_end(sorted(survivors))
        if not made.are_real:
            made.mend(CUT)
        training.await_end(ON_CUT)
        training.await_end([KILLED])
        training.send("over")
        training.await_end([RANKS])
        codes = [process.returncode for process in job.processes]
    text = output.read_text()
    assert codes == [-signal.SIGKILL if rank == KILLED else 0 for rank in range(RANKS + 1)], text
    (run,) = ended_runs(tmp_path, 1)
    assert run.exit_code == 1  # a rank was lost
    history = History(read_history(run.path))
    record_testsuite_property("limits", check_waits(text, cut, killed, survivors, are_real=made.are_real))
    check_rows(history, until, everybody, reached, survivors)
    check_messages(text, history)


def check_waits(text: str, cut: float, killed: float, survivors: frozenset[int], *, are_real: bool) -> dict[str, float]:
    """Check that no rank waits longer than the limits for lost ranks; return seconds until detection and finish."""
    detected = {
        what: max(float(line.split()[1]) for line in text.splitlines() if f"Lost {what} after step" in line) - since
        for what, since in ((f"ranks 12-15 (node {CUT})", cut), (f"rank {KILLED}", killed))
    }
    assert max(detected.values()) < 2 * PEER + MORE
    ended = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("ENDED ")]
    assert {fact["group"] for fact in ended} == {"TreeGroup"}
    took = {fact["rank"]: fact["finish"] for fact in ended}
    assert took.keys() == survivors | set(ON_CUT)
    assert max(took.values()) < FINISH + MORE
    assert max(fact["log"] for fact in ended if are_real or fact["rank"] in survivors) < PEER
    slowest = {"finish": max(took[rank] for rank in survivors), "finish, cut off": max(took[rank] for rank in ON_CUT)}
    return {**detected, **slowest}


def check_rows(
    history: History, until: int, everybody: frozenset[int], reached: frozenset[int], survivors: frozenset[int]
) -> None:
    """Check that each row is the mean of its ranks, with the number of missing ones, and that survivors are in all."""
    losses, flags = history.last("loss"), history.flags("loss")
    taking_part = {step: members(who) for step, who in sorted(history.last("who").items())}
    assert list(taking_part) == list(range(until + 1))
    assert losses == {step: fmean(step + rank for rank in ranks) for step, ranks in taking_part.items()}
    assert flags == {step: RANKS - len(ranks) for step, ranks in taking_part.items()}
    assert all(ranks >= survivors for ranks in taking_part.values())
    for rank in everybody - survivors:
        steps = [step for step, ranks in taking_part.items() if rank in ranks]
        assert steps == list(range(len(steps)))
    assert [taking_part[0], taking_part[until]] == [everybody, survivors]
    assert reached in taking_part.values()


def check_messages(text: str, history: History) -> None:
    """Check that one survivor reports lost ranks, as ranges, and cut-off ranks the last step that was kept."""
    lost = re.findall(r"Lost (ranks? .*?) after step \d+; continuing", text)
    expected = {f"ranks 12-15 (node {CUT})": 1, f"rank {KILLED}": 1}
    assert {what: lost.count(what) for what in expected} == expected
    assert len(lost) == sum(expected.values())
    found = re.findall(r"rank (\d+) (?:logged|stalled, or was disconnected,) after step (\d+)", text)
    unheard = {int(rank): int(step) for rank, step in found}
    assert unheard.keys() == set(ON_CUT)
    for rank, step in unheard.items():
        assert all(rank in members(history.last("who")[before]) for before in range(step + 1))
