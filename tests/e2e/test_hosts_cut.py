"""A job on hosts of which one is cut off: no connection is closed. In a tree of hosts, a leader of another is killed.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch.distributed as dist
from history import History, history_of
from hosts import hosts, ranks_on
from processes import Job, clean_environment, free_port, started, wait_until, words_of
from pulse import Pulse
from stored import ended_runs, find_runs, rows_in

import dist_wandb
from dist_wandb.exchange import transport as groups

PACE, PEER, FINISH = 0.1, 4.0, 6.0  # seconds: between two rows, peer_timeout, finish_timeout
SOON = 120.0  # seconds within which an expected event must happen
LIMITS = dist_wandb.Limits(peer_timeout=PEER, join_timeout=60.0, finish_timeout=FINISH, heartbeat=0.2)


@dataclass(frozen=True)
class Layout:
    """Hosts with as many ranks each; the last host is cut off, and one more rank is killed."""

    hosts: int
    killed: frozenset[int]  # the first rank of another host
    more: float  # seconds beyond the limits, on a busy machine: less than any default limit

    @property
    def is_tree(self) -> bool:  # of groups of the ranks of one host
        return self.hosts > 2

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(range(self.hosts**2))

    @property
    def on_cut(self) -> frozenset[int]:
        return frozenset(sorted(self.ranks)[-self.hosts :])

    @property
    def survivors(self) -> frozenset[int]:
        return self.ranks - self.on_cut - self.killed


ONE_GROUP, TREE = Layout(2, frozenset(), 5.0), Layout(4, frozenset([4]), 20.0)


def take_part(into: str) -> None:
    """Log at the same pace as all other ranks, until the test announces the last step of this host.

    In one group, log into a run of the host as well. No collectives: nothing but the logging depends on other hosts.
    """
    directory, per_host = Path(into), int(os.environ["LOCAL_WORLD_SIZE"])
    pulse = Pulse()
    logging.basicConfig(format="AT %(created).2f %(message)s")
    rank, slowest, is_tree = int(os.environ["RANK"]), 0.0, per_host > 2
    given: dict[str, Any] = {"dir": into, "limits": LIMITS, "reduce": {"who": "sum"}, "reinit": "create_new"}
    if is_tree:
        groups.FAN_OUT = per_host
    else:
        dist.init_process_group("gloo")
    runs = [dist_wandb.init("tests", id="job", **given)]
    runs += [] if is_tree else [dist_wandb.init("tests", id="host", rank_scope="worker", **given)]
    for run in runs:
        run.log({"loss": float(rank), "who": 2**rank}, step=0)
    assert runs[0].flush(60.0)
    group = type(runs[0]._exchange.group).__name__  # type: ignore[attr-defined]  # nothing public shows it
    (directory / f"begun-{rank}").write_text(str(os.getpid()))
    began, step = float(awaited(directory / "begin")), 0
    while step < last_step(directory):
        step += 1
        time.sleep(max(0.0, began + step * PACE - time.time()))
        before = time.monotonic()
        for run in runs:
            run.log({"loss": float(step + rank), "who": 2**rank}, step=step)
        slowest = max(slowest, pulse.own(before, time.monotonic()))
    took = 0.0
    for run in runs:
        before = time.monotonic()
        run.finish()
        took = max(took, pulse.own(before, time.monotonic()))
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
    job: Job  # the processes, by rank; in a tree, the last one hosts the store
    layout: Layout
    began: float = 0.0  # time at which the ranks began to log

    def begin(self) -> None:
        """Let the ranks begin to log after they have joined."""
        pids = [self.directory / f"begun-{rank}" for rank in self.layout.ranks]
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
        run = next(path for path in find_runs(self.directory) if "-job" in path.name)
        wait_until(lambda: any(members(row.get("who", 0)) == ranks for row in rows_in(run)), SOON)

    def end_soon(self, *on: int) -> int:
        """Let the ranks of some hosts end in five seconds; return their last step, which none has reached yet."""
        until = int((time.time() + 5 - self.began) / PACE)
        for host in on:
            self.send(f"until-{host}", until)
        return until

    def kill(self, rank: int) -> None:
        os.kill(int((self.directory / f"begun-{rank}").read_text()), signal.SIGKILL)

    def await_end(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.job.processes[rank].wait(SOON)


def members(who: float) -> frozenset[int]:
    """Return the ranks in a sum of powers of two."""
    return frozenset(rank for rank in TREE.ranks if int(who) >> rank & 1)


@pytest.mark.alone  # on a busy machine, its limits are so short that neighbours would count as lost
@pytest.mark.parametrize("layout", [ONE_GROUP, TREE], ids=["one group", "a tree"])
def test_others_continue_without_a_host_that_is_cut_off_and_without_the_leader_of_another(
    layout: Layout, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """No connection is closed. No rank waits longer than the limits, and ranks that were cut off report lost rows."""
    cut_host, output = layout.hosts - 1, tmp_path / "output"
    environment = clean_environment(WANDB_SILENT="true")
    with hosts(layout.hosts) as made, contextlib.ExitStack() as stack:
        record_testsuite_property(f"{layout.hosts} hosts", made.why_loopback or "network namespaces")
        port, stores = free_port(), []
        variables: dict[str, object] = {"MASTER_PORT": port, "GLOO_SOCKET_IFNAME": made.interface}
        if layout.is_tree:
            variables = {
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCHELASTIC_RESTART_COUNT": 0,
            }
            stores = [made.on(0, sys.executable, *words_of(keep_store, tmp_path, made.addresses[0], port))]
        commands = [*ranks_on(made, take_part, tmp_path, per_host=layout.hosts, **variables), *stores]
        job = stack.enter_context(started(*commands, cwd=tmp_path, environment=environment, output=output))
        training = Training(tmp_path, job, layout)
        training.begin()
        training.await_row(layout.ranks)
        made.cut(cut_host)
        cut = time.time()
        training.await_row(layout.ranks - layout.on_cut)
        for rank in layout.killed:
            training.end_soon(cut_host)
            training.kill(rank)
        killed = time.time()
        training.await_row(layout.survivors)
        until = training.end_soon(*(host for host in range(layout.hosts) if not layout.killed or host != cut_host))
        training.await_end(layout.survivors)
        if not made.are_real:
            made.mend(cut_host)
        training.await_end(layout.on_cut | layout.killed)
        training.send("over")
        codes = [process.wait(SOON) for process in job.processes]
    text = output.read_text()
    assert codes == [-signal.SIGKILL if rank in layout.killed else 0 for rank in range(len(codes))], text
    runs = {run.run_id: run for run in ended_runs(tmp_path, 1 if layout.is_tree else 3)}
    whole = runs.pop("job")
    assert whole.exit_code == 1  # a rank was lost
    history = history_of(whole)
    record_testsuite_property("limits", check_waits(layout, text, cut, killed, are_real=made.are_real))
    check_rows(layout, history, until)
    check_messages(layout, text, history)
    for host, run in enumerate(runs.values()) if made.are_real else ():  # stopped processes count each other as lost
        rows = history_of(run)
        assert (run.run_id, run.exit_code) == (f"host-worker-{host}", 0)
        assert rows.last("loss") == {step: step + 2 * host + 0.5 for step in range(until + 1)}
        assert not any(rows.flags("loss").values())


def lost_of(layout: Layout) -> list[str]:
    first, last = min(layout.on_cut), max(layout.on_cut)
    return [f"ranks {first}-{last} (node {layout.hosts - 1})", *(f"rank {rank}" for rank in layout.killed)]


def check_waits(layout: Layout, text: str, cut: float, killed: float, *, are_real: bool) -> dict[str, float]:
    """Check that no rank waits longer than the limits for lost ranks; return seconds until detection and finish."""
    detected = {
        what: max(float(line.split()[1]) for line in text.splitlines() if f"Lost {what} after step" in line) - since
        for what, since in zip(lost_of(layout), (cut, killed), strict=False)
    }
    assert max(detected.values()) < 2 * PEER + layout.more
    ended = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("ENDED ")]
    assert {fact["group"] for fact in ended} == {"TreeGroup" if layout.is_tree else "GlooGroup"}
    took = {fact["rank"]: fact["finish"] for fact in ended}
    assert took.keys() == layout.ranks - layout.killed
    slowest = {"finish": max(took[rank] for rank in layout.survivors), "finish, cut off": max(took.values())}
    assert slowest["finish"] < FINISH + (layout.more if layout.is_tree else 0.0), "no rank waits for a lost one"
    assert slowest["finish, cut off"] < FINISH + layout.more
    assert max(fact["log"] for fact in ended if are_real or fact["rank"] in layout.survivors) < PEER
    return {**detected, **slowest}


def check_rows(layout: Layout, history: History, until: int) -> None:
    """Check that each row is the mean of its ranks, with the number of missing ones, and that survivors are in all."""
    losses, flags = history.last("loss"), history.flags("loss")
    taking_part = {step: members(who) for step, who in sorted(history.last("who").items())}
    assert list(taking_part) == list(range(until + 1))
    assert losses == {step: fmean(step + rank for rank in ranks) for step, ranks in taking_part.items()}
    assert flags == {step: len(layout.ranks) - len(ranks) for step, ranks in taking_part.items()}
    assert all(ranks >= layout.survivors for ranks in taking_part.values())
    for rank in layout.ranks - layout.survivors:
        steps = [step for step, ranks in taking_part.items() if rank in ranks]
        assert steps == list(range(len(steps)))
    assert [taking_part[0], taking_part[until]] == [layout.ranks, layout.survivors]
    assert layout.ranks - layout.on_cut in taking_part.values()


def check_messages(layout: Layout, text: str, history: History) -> None:
    """Check that one survivor reports lost ranks, as ranges, and cut-off ranks the last step that was kept."""
    lost = re.findall(r"Lost (ranks? .*?) after step \d+; continuing", text)
    assert sorted(lost) == sorted(lost_of(layout))
    found = re.findall(r"rank (\d+) (?:logged|stalled, or was disconnected,) after step (\d+)", text)
    unheard = {int(rank): int(step) for rank, step in found}
    assert unheard.keys() == layout.on_cut
    for rank, step in unheard.items():
        assert all(rank in members(history.last("who")[before]) for before in range(step + 1))
