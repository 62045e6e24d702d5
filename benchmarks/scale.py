"""Jobs of many ranks on one machine: their use of the job's store, and whether all rows are reduced.

    python -m benchmarks.scale --ranks 64 128 256 512

A process imports torch and wandb and forks the ranks, so that each takes little memory. They use a real TCPStore in a
separate process, as under torchrun, and form real groups of gloo. Each opens a session, logs rows and finishes it; rank
0 writes an offline run. Nodes are simulated: all addresses are those of this machine.

torch looks up the name of the peer of each connection to the store, on both sides, and the store is blocked meanwhile.
A slow name server, or one that loses one of hundreds of requests, would dominate the measurement. So the job gets a
separate network that has only a loopback, if root runs this on Linux (`isolated`).

The output is JSON, with times in seconds. The exit code is 1 if it contains `failures`: a rank that fails or does not
end, a row that was not reduced over all ranks or is marked as degraded, a `flush` that returned false; and, with
several sizes, a store whose processor time for each rank grows by more than half from the smallest to the largest. Of
each job:

- rows: number of logged steps, of steps with the values of all ranks, of all written rows, as some are corrected, and
  of steps whose last row is marked as degraded.
- flushed: number of ranks on which each `flush` returned that everything is delivered.
- keys: keys requested from the store, by all ranks together, by the median rank, by the rank with most requests, and by
  kind of call. Keys that gloo requests to form groups are computed: two for each member of a group, and one.
- store_cpu: processor time of the store's process.
- times: from the start of the first rank until the first, the median and the last rank has reached a stage. Ranks are
  forked one after the other, so the last one starts late.
- cpu, private_mb: processor time and memory of the median rank, in MiB; memory that all ranks share is not counted.

Many ranks share the processors of one machine, so keys and the store's processor time are more meaningful than times.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import gc
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from benchmarks import common, scale_rank
from benchmarks.scale_rank import Job

from dist_wandb.exchange import transport as groups
from dist_wandb.settings.reduction import DEGRADED

_MOST_SHOWN = 5  # warnings and errors
_MOST_GROWTH = 1.5  # of the store's processor time for each rank, from the smallest job to the largest
_STAGES = ("started", "store", "layout", "opened", "formed", "first_flush", "logged", "finished")  # of a rank
_NEW_NETWORK, _SET_FLAGS, _UP = 0x40000000, 0x8914, 0x1  # CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP


def main() -> None:
    """Measure the jobs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--names", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--fan-out", type=int, default=groups.FAN_OUT, help="members of a group at most")
    given = parser.parse_args()
    groups.FAN_OUT = given.fan_out
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the store has two or three connections of each rank
    is_isolated = _leave_network()
    gc.collect()
    gc.freeze()
    jobs, failures = [], []
    for ranks in given.ranks:
        job = Job(ranks, given.per_node, given.rows, given.names, given.pause, given.limit)
        found = _play(job)
        failures += [f"{ranks} ranks: {failure}" for failure in _failures(found, job)]
        jobs.append(found)
    failures += _growth(jobs)
    report = {"isolated": is_isolated, "fan_out": groups.FAN_OUT, "jobs": jobs, "failures": failures}
    print(json.dumps(report, indent=2))
    sys.exit(bool(failures))


def _leave_network() -> bool:
    """Give this process and its forks a network that has only a loopback; return whether that was possible."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(_NEW_NETWORK):
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))
    return True


def _play(job: Job) -> dict[str, Any]:
    """Run a job; return its results."""
    directory = tempfile.mkdtemp(prefix="dist_wandb-scale-")
    store, port = _start_store(directory)
    ranks: list[int] = []
    try:
        for rank in range(job.ranks):
            pid = os.fork()
            if not pid:
                scale_rank.play(rank, job, port, directory)
            ranks.append(pid)
        codes = _codes_of(ranks, job.limit)
        found = _summary(directory, job)
        found.update(exit_codes=dict(Counter(codes)), store_cpu=round(_processor_time(store), 3))
    finally:
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        shutil.rmtree(directory, ignore_errors=True)
    return found


def _start_store(directory: str) -> tuple[int, int]:
    """Start a process with a store; return its id and the port."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        scale_rank.redirect_errors(Path(directory, "store.err"))
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        while True:
            signal.pause()
    with os.fdopen(reading) as told:
        return pid, int(told.readline())


def _codes_of(ranks: list[int], limit: float) -> list[int]:
    """Return the exit codes of processes. Processes that time out are killed."""
    codes: list[int] = []
    waiting = set(ranks)
    deadline = time.monotonic() + limit
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes += [os.waitstatus_to_exitcode(status)] * (pid in waiting)
            waiting.discard(pid)
        elif time.monotonic() > deadline:
            for each in waiting:
                os.kill(each, signal.SIGKILL)
            deadline += limit
        else:
            time.sleep(0.05)
    return codes


def _processor_time(pid: int) -> float:
    """Return seconds of user and system time of a process, by the kernel's clock (`clock_getcpuclockid`)."""
    return time.clock_gettime((~pid << 3) | 2)


# The results of the ranks


def _summary(directory: str, job: Job) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    errors: list[str] = []
    for rank in range(job.ranks):
        with suppress(OSError, ValueError):
            found.append(json.loads(Path(directory, f"rank-{rank}.json").read_text(encoding="utf-8")))
    silent = set(range(job.ranks)) - {each["rank"] for each in found}  # they were killed or have crashed
    errors += [f"rank {rank}: {_end_of_errors(directory, rank)}" for rank in sorted(silent)]
    errors += [f"rank {each['rank']}: {each['error']}" for each in found if "error" in each]
    keys = [sum(each["keys"].values()) for each in found] or [0]
    kinds: Counter[str] = Counter()
    for each in found:
        kinds.update(each["keys"])
    warnings = Counter(message for each in found for message in each["warnings"])
    return {
        "ranks": job.ranks,
        "per_node": job.per_node,
        "reported": len(found),
        "errors": errors[:_MOST_SHOWN],
        "rows": _rows_of([row for each in found for row in each.get("rows", ())], job),
        "flushed": sum(bool(each.get("flushed")) for each in found),
        "keys": {
            "all": sum(keys),
            "median": statistics.median(keys),
            "most": max(keys),
            "by_kind": dict(kinds.most_common()),
        },
        "times": _times_of([each["times"] for each in found]),
        "cpu": round(statistics.median([each["cpu"] for each in found] or [0.0]), 3),
        "private_mb": round(statistics.median([each["private_mb"] or 0.0 for each in found] or [0.0]), 1),
        "warnings": {"number": warnings.total(), "examples": dict(warnings.most_common(_MOST_SHOWN))},
    }


def _end_of_errors(directory: str, rank: int) -> str:
    """Return the end of a rank's standard error."""
    with suppress(OSError):
        return Path(directory, f"rank-{rank}.err").read_text(encoding="utf-8", errors="replace")[-1000:]
    return ""


def _times_of(ranks: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return by stage when the first, the median and the last rank had reached it."""
    began = min((times["started"] for times in ranks), default=0.0)
    found = {}
    for stage in _STAGES:
        reached = sorted(times[stage] - began for times in ranks if stage in times)
        if reached:
            found[stage] = [round(each, 2) for each in (reached[0], statistics.median(reached), reached[-1])]
    return found


def _failures(found: dict[str, Any], job: Job) -> list[str]:
    """Return the failures of a job."""
    failures = [] if found["exit_codes"] == {0: job.ranks} else [f"exit codes {found['exit_codes']}"]
    failures += found["errors"]
    if found["flushed"] != job.ranks:
        failures.append(f"flush returned true on {found['flushed']}")
    rows = found["rows"]
    if rows["brought_together"] != job.rows or rows["flagged"]:
        failures.append(f"rows {rows}")
    return failures


def _growth(jobs: list[dict[str, Any]]) -> list[str]:
    """Return a failure if the store's work grows faster than the number of ranks."""
    ordered = sorted(jobs, key=lambda found: int(found["ranks"]))
    smallest, largest = (each["store_cpu"] / each["ranks"] for each in (ordered[0], ordered[-1]))
    if largest <= _MOST_GROWTH * smallest:
        return []
    return [f"the store's processor time for each rank grows by {largest / smallest:.2f}, and may by {_MOST_GROWTH}"]


def _rows_of(rows: list[dict[str, Any]], job: Job) -> dict[str, int]:
    last = {row["global_step"]: row for row in rows if "global_step" in row}
    mean = (job.ranks - 1) / 2
    whole = [
        step
        for step, row in last.items()
        if all(
            abs(row.get(name, -1.0) - value) < 1e-6 for name, value in common.numbers(job.names, mean + step).items()
        )
    ]
    flagged = sum(bool(row.get(DEGRADED)) for row in last.values())
    return {"logged": job.rows, "brought_together": len(whole), "written": len(rows), "flagged": flagged}


if __name__ == "__main__":
    main()
