"""One job of many ranks on one machine: what it asks of the job's store, and whether all rows are brought together.

    python -m benchmarks.scale --ranks 128

A process imports torch and wandb and forks the ranks, which costs each little memory. They find a real TCPStore, which
has a process of its own, as under torchrun, and form real groups of gloo. Each opens a session, logs rows and finishes
it; rank 0 writes an offline run. Nodes are pretended: all addresses are those of this machine.

It prints JSON, with times in seconds:

- rows: how many steps were logged, how many came to the numbers of all ranks, how many rows were written in all, as
  some are corrected, and how many last rows of a step were flagged as lacking ranks.
- flushed: ranks on which each `flush` returned that all is delivered.
- keys: keys asked of the store, by all ranks together, by the median rank, by the one that asked most, and by kind of
  call. Those that gloo asks for by itself, to form groups, are computed: two for each member of a group, and one.
- store_cpu: processor time of the store's process.
- opened, first_flush, logged, finished_after: until the last rank had done it, from when the last rank was forked.
- cpu: processor time of the median rank.

Many ranks share the processors of one machine, so times say little; keys and the store's processor time say more.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import logging
import os
import resource
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import wandb
from benchmarks import common

import dist_wandb
from dist_wandb.exchange.rows import DEGRADED
from dist_wandb.exchange.transport import gloo, layout, tree
from dist_wandb.session import opener

_LOADED = (torch, wandb, opener, tree)  # before the ranks are forked
_GLOO_KEYS = 2  # that gloo asks for of each member of a group
_MOST_WARNINGS = 5  # that are shown


@dataclass(frozen=True)
class Job:
    """What is measured.

    Args:
        ranks: How many there are.
        per_node: How many pretend to be on one node.
        rows: How many each rank logs.
        names: How many numbers are in each row.
        pause: How long a rank waits between two rows, in seconds.
        limit: How long anything may take, in seconds.
    """

    ranks: int
    per_node: int
    rows: int
    names: int
    pause: float
    limit: float


def main() -> None:
    """Measure one job, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--rows", type=int, default=10)
    parser.add_argument("--names", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--limit", type=float, default=300.0)
    parser.add_argument("--fan-out", type=int, default=layout.FAN_OUT, help="members of a group at most")
    told = parser.parse_args()
    layout.FAN_OUT = told.fan_out
    job = Job(told.ranks, told.per_node, told.rows, told.names, told.pause, told.limit)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the store has two connections or three of each rank
    directory = tempfile.mkdtemp(prefix="dist_wandb-scale-")
    store, port = _start_store()
    gc.collect()
    gc.freeze()
    ranks = []
    for rank in range(job.ranks):
        pid = os.fork()
        if not pid:
            _as_rank(rank, job, port, directory)
        ranks.append(pid)
    forked = time.time()
    codes = _codes_of(ranks, job.limit)
    found = _summary(directory, job, forked)
    found.update(exit_codes=dict(Counter(codes)), fan_out=layout.FAN_OUT, store_cpu=_processor_time(store))
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(found, indent=2))


def _start_store() -> tuple[int, int]:
    """A process that keeps a store; its id and the port."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        while True:
            signal.pause()
    with os.fdopen(reading) as told:
        return pid, int(told.readline())


def _codes_of(ranks: list[int], limit: float) -> list[int]:
    """Exit codes of processes; those that take too long are killed."""
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
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# One rank


def _as_rank(rank: int, job: Job, port: int, directory: str) -> NoReturn:
    """Open a session, log, finish, and leave what was found.

    The process ends as a script does, but for Python's own end: that would write to memory that all ranks share.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in list(os.environ):
        if name.startswith(("WANDB_", "DIST_WANDB_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI")):
            del os.environ[name]
    node = rank // job.per_node
    layout_variables = {
        "RANK": rank,
        "WORLD_SIZE": job.ranks,
        "LOCAL_RANK": rank % job.per_node,
        "GROUP_RANK": node,
        "LOCAL_WORLD_SIZE": min(job.per_node, job.ranks - node * job.per_node),
        "GROUP_WORLD_SIZE": -(-job.ranks // job.per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "scale",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "OMP_NUM_THREADS": 1,
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_ERROR_REPORTING": "false",
    }
    os.environ.update({name: str(value) for name, value in layout_variables.items()})
    torch.set_num_threads(1)
    warnings = _Warnings()
    logging.getLogger("dist_wandb").addHandler(warnings)
    logging.getLogger("dist_wandb").propagate = False
    found: dict[str, Any] = {"rank": rank}
    with _counted_keys() as keys:
        try:
            _log_rows(rank, job, directory, found)
        except Exception as error:  # noqa: BLE001  # it is reported
            found["error"] = repr(error)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        found.update(keys=keys, cpu=usage.ru_utime + usage.ru_stime, warnings=warnings.messages)
        Path(directory, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    atexit._run_exitfuncs()  # noqa: SLF001  # there is no public way
    os._exit(0)


def _log_rows(rank: int, job: Job, directory: str, found: dict[str, Any]) -> None:
    limits = dist_wandb.Limits(join_timeout=job.limit, finish_timeout=job.limit)
    session = dist_wandb.init(project="scale", mode="offline", dir=directory, limits=limits)
    found["opened"] = time.time()
    with common.watching(session) as handed:
        session.log(_row(rank, 0, job), step=0)
        found["flushed"] = session.flush(job.limit)
        found["first_flush"] = time.time()
        for step in range(1, job.rows):
            session.log(_row(rank, step, job), step=step)
            time.sleep(job.pause)
        found["flushed"] &= session.flush(job.limit)
        found["logged"] = time.time()
        session.finish()
        found["finished_after"] = time.time()
        if session.run:
            found["rows"] = []
            while not handed.empty():
                found["rows"].append(handed.get().row)


def _row(rank: int, step: int, job: Job) -> dict[str, float]:
    return common.numbers(job.names, float(rank + step))


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage()[:300])


class _counted_keys:  # noqa: N801  # used as a function
    """Count the keys that this process asks the store for."""

    def __enter__(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        lock = threading.Lock()

        def counting(kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
            def call(store: Any, keys: Any, *arguments: Any) -> Any:
                with lock:
                    counts[kind] += len(keys) if isinstance(keys, list) else 1
                return method(store, keys, *arguments)

            return call

        kinds = ("set", "get", "add", "check", "compare_set", "multi_get", "delete_key")
        methods = {kind: counting(kind, getattr(dist.PrefixStore, kind)) for kind in kinds}
        dist.PrefixStore = type("CountingStore", (dist.PrefixStore,), methods)  # type: ignore[misc, assignment]
        form = gloo.GlooGroup.__init__

        def form_counted(group: gloo.GlooGroup, store: Any, rank: int, size: int, *arguments: Any) -> None:
            counts["gloo"] += 1 + _GLOO_KEYS * size
            form(group, store, rank, size, *arguments)

        gloo.GlooGroup.__init__ = form_counted  # type: ignore[method-assign, assignment]
        return counts

    def __exit__(self, *_: object) -> None:
        """The process ends."""


# What the ranks found


def _summary(directory: str, job: Job, forked: float) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for rank in range(job.ranks):
        with suppress(OSError, ValueError):
            found.append(json.loads(Path(directory, f"rank-{rank}.json").read_text(encoding="utf-8")))
    keys = [sum(each["keys"].values()) for each in found] or [0]
    kinds: Counter[str] = Counter()
    for each in found:
        kinds.update(each["keys"])
    warnings = Counter(message for each in found for message in each["warnings"])
    return {
        "ranks": job.ranks,
        "per_node": job.per_node,
        "reported": len(found),
        "errors": [each["error"] for each in found if "error" in each][:_MOST_WARNINGS],
        "rows": _rows_of([row for each in found for row in each.get("rows", ())], job),
        "flushed": sum(bool(each.get("flushed")) for each in found),
        "keys": {
            "all": sum(keys),
            "median": statistics.median(keys),
            "most": max(keys),
            "by_kind": dict(kinds.most_common()),
        },
        **{
            what: round(max((each.get(what, forked) for each in found), default=forked) - forked, 2)
            for what in ("opened", "first_flush", "logged", "finished_after")
        },
        "cpu": round(statistics.median([each["cpu"] for each in found] or [0.0]), 3),
        "warnings": {"number": warnings.total(), "examples": dict(warnings.most_common(_MOST_WARNINGS))},
    }


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
