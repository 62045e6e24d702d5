"""A job on two hosts with separate addresses, and its runs on disk. For a host that is cut off see test_hosts_cut.py.

The hosts are network namespaces. If these cannot be created, the same jobs run on loopback, with a warning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import hosts, torchrun_on
from processes import Finished, run_job
from stored import COMBINATIONS, PATIENT, ROWS, check_runs, ended_runs, vector

import dist_wandb


def log_rows(run: dist_wandb.Session) -> None:
    for row in range(ROWS):
        run.log({"loss": 10.0 * run.topology.global_rank + row})


def open_all(into: str) -> None:
    """One rank of plain PyTorch without a process group: every mode and scope in turn, each in its own directory."""
    directory = Path(into)
    given: dict[str, Any] = {"id": "exp", "name": "nm", "config": {"lr": 0.1}}
    limits = dist_wandb.Limits(heartbeat=PATIENT)
    for mode, scope in COMBINATIONS:
        given["dir"] = str(directory / f"{mode}-{scope}")
        with dist_wandb.init("tests", run_mode=mode, rank_scope=scope, limits=limits, **given) as run:
            assert dist_wandb.get_run() is run
            log_rows(run)
        assert not dist_wandb.get_run()
    with dist_wandb.init("tests", run_mode="new", dir=str(directory / "generated")) as run:
        log_rows(run)
        sys.stdout.write(f"\nSAW {json.dumps({'rank': run.topology.global_rank, 'base_id': run.plan.base_id})}\n")


def test_runs_of_all_modes_on_two_hosts_match_the_test_vectors(
    tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    """No variable helps gloo, and the host names do not resolve: the exchange finds addresses automatically."""
    with hosts(2) as made:
        record_testsuite_property("hosts", made.why_loopback or "network namespaces")
        commands = torchrun_on(made, open_all, tmp_path, processes=(2, 2))
        finished = run_job(*commands, cwd=tmp_path).check()
    assert "Lost rank" not in finished.output
    for run_mode, rank_scope in COMBINATIONS:
        check_runs(tmp_path / f"{run_mode}-{rank_scope}", vector("2x2", run_mode, rank_scope))
    seen = [json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW ")]
    assert sorted(fact["rank"] for fact in seen) == list(range(4))
    (base_id,) = {fact["base_id"] for fact in seen}
    ids = {stored.run_id for stored in ended_runs(tmp_path / "generated", 4)}
    assert ids == {f"{base_id}-rank-{rank}" for rank in range(4)}
    check_announcements(finished)


def check_announcements(finished: Finished) -> None:
    """Check that each unit prints one line: one for the job in global scope, one for each node in worker scope."""
    lines = finished.lines("dist_wandb: run_mode=")
    job_lines = len([scope for _, scope in COMBINATIONS if scope == "global"]) + 1  # and the run with a generated id
    node_lines = len([scope for _, scope in COMBINATIONS if scope == "worker"]) * 2
    assert len(lines) == job_lines + node_lines
    assert all("4 ranks on 2 nodes" in line and "(offline, " in line for line in lines)
    # At the end of each shared run one line, and no lines of W&B, which would be wrong there.
    uploads = [line.partition("dist-wandb sync ")[2] for line in finished.lines("dist_wandb: the run ")]
    assert len(uploads) == 3
    assert len(finished.lines("dist_wandb: ")) == len(lines) + len(uploads)
    shared = [directory for directory in uploads if directory]
    syncs = [line for line in finished.output.splitlines() if "wandb: wandb sync" in line]
    assert not [line for line in syncs if any(directory in line for directory in shared)]
