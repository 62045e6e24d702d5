"""A job on two hosts of which one is cut off: no connection is closed. For a tree of hosts see test_hosts_tree.py.

The hosts are network namespaces. If these cannot be created, the same job runs on loopback, with a warning.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from history import History
from hosts import Hosts, hosts, ranks_on
from processes import Finished, Job, clean_environment, started, wait_until
from pulse import Pulse
from stored import ended_runs, read_history

import dist_wandb

STEPS, FLUSHED = 80, 10
PACE, FINISH, PEER = 0.1, 6.0, 3.0  # seconds: between two rows, finish_timeout, peer_timeout
MORE = 5.0  # seconds beyond those, on a busy machine


def take_part(directory: str) -> None:
    """Log into the runs of job and host. No collectives: nothing but the logging depends on the other host."""
    pulse = Pulse()
    logging.basicConfig(format="AT %(created).2f %(message)s")
    dist.init_process_group("gloo")
    rank, slowest = dist.get_rank(), 0.0
    limits = dist_wandb.Limits(peer_timeout=PEER, join_timeout=15.0, finish_timeout=FINISH, heartbeat=0.2)
    job = dist_wandb.init("tests", id="job", dir=directory, reinit="create_new", limits=limits)
    host = dist_wandb.init("tests", rank_scope="worker", id="host", dir=directory, reinit="create_new", limits=limits)
    for step in range(STEPS):
        begun = time.monotonic()
        job.log({"loss": step + float(rank)}, step=step)
        host.log({"loss": step + float(rank)}, step=step)
        slowest = max(slowest, pulse.own(begun, time.monotonic()))
        if step == FLUSHED:  # the others are there, and means flow
            Path(f"begun-{rank}").write_text(str(job.flush(10.0)))
        time.sleep(PACE)
    took = []
    for run in (job, host):
        begun = time.monotonic()
        run.finish()
        took.append(round(pulse.own(begun, time.monotonic()), 2))
    sys.stdout.write(f"\nENDED {json.dumps({'rank': rank, 'log': slowest, 'finish': took})}\n")


def cut_off_in_the_middle(made: Hosts, job: Job, directory: Path) -> float:
    """Cut off the second host after the first means, and wait for the first host to end; return the time of the cut."""
    wait_until(lambda: all((directory / f"begun-{rank}").exists() for rank in range(4)), 60)
    made.cut(1)
    cut = time.time()
    for rank in (0, 1):
        job.processes[rank].wait(60)
    if not made.are_real:
        made.mend(1)
    return cut


@pytest.mark.alone  # on a busy machine, its limits are so short that neighbours would count as lost
def test_survivors_continue_without_a_host_that_is_cut_off(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """No connection is closed. No rank waits longer than the limits, and ranks that were cut off report lost rows."""
    with hosts(2) as made:
        record_testsuite_property("hosts", made.why_loopback or "network namespaces")
        commands = ranks_on(made, take_part, tmp_path, per_host=2, GLOO_SOCKET_IFNAME=made.interface)
        with started(*commands, cwd=tmp_path, environment=clean_environment(WANDB_SILENT="true")) as job:
            cut = cut_off_in_the_middle(made, job, tmp_path)
            finished = job.wait(60).check()
    ended = {fact["rank"]: fact for fact in (json.loads(line[6:]) for line in finished.lines("ENDED "))}
    record_testsuite_property("seconds", {rank: (fact["log"], fact["finish"]) for rank, fact in ended.items()})
    record_testsuite_property("survivors continue after", check_messages(finished, cut))
    assert max(fact["log"] for fact in ended.values() if made.are_real or fact["rank"] < 2) < PEER
    assert max(*ended[0]["finish"], *ended[1]["finish"]) < FINISH  # no rank waits for a lost one
    assert max(*ended[2]["finish"], *ended[3]["finish"]) < FINISH + MORE
    check_rows(tmp_path, are_real=made.are_real)


def check_messages(finished: Finished, cut: float) -> float:
    """Check that one survivor names the lost ranks in time, and lost ranks their lost rows; return its delay."""
    gone = [line for line in finished.lines("AT ") if "Lost ranks 2-3 (node 1) after step" in line]
    assert len(gone) == 1, finished.output
    after = float(gone[0].split()[1]) - cut
    assert after < 2 * PEER + MORE
    for rank in (2, 3):
        assert f"what rank {rank} logged after step " in finished.output, finished.output
    return after


def check_rows(directory: Path, *, are_real: bool) -> None:
    """Check that no row is missing: the job's rows have all reachable ranks, each host's rows both of its ranks."""
    runs = {run.run_id: run for run in ended_runs(directory, 3)}
    histories: dict[str, Any] = {run_id: History(read_history(run.path)) for run_id, run in runs.items()}
    assert {run_id: run.exit_code for run_id, run in runs.items()} == {"job": 1, "host-worker-0": 0, "host-worker-1": 0}
    losses, flags = histories["job"].last("loss"), histories["job"].flags("loss")
    assert sorted(losses) == list(range(STEPS))
    assert [losses[step] - step for step in range(FLUSHED + 1)] == [1.5] * (FLUSHED + 1)
    assert [(losses[step] - step, flags[step]) for step in range(STEPS - 10, STEPS)] == [(0.5, 2)] * 10
    for host in (0, 1) if are_real else (0,):  # stopped processes count each other as lost
        history = histories[f"host-worker-{host}"]
        assert history.last("loss") == {step: step + 2 * host + 0.5 for step in range(STEPS)}
        assert not any(history.flags("loss").values())
