"""One rank of the jobs of `benchmarks.scale`, as a fork of a process that has imported torch and wandb."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import signal
import sys
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
from dist_wandb.exchange.membership.forming import Forming
from dist_wandb.exchange.transport import gloo, tree
from dist_wandb.job.job_store import JobStore
from dist_wandb.session import opener

_LOADED = (torch, wandb, opener, tree)  # before the ranks are forked
_GLOO_KEYS = 2  # that gloo requests for each member of a group


@dataclass(frozen=True)
class Job:
    """A job to measure.

    Args:
        ranks: Number of ranks.
        per_node: Number of ranks on each simulated node.
        rows: Number of rows that each rank logs.
        names: Number of values in each row.
        pause: Seconds between two rows of a rank.
        limit: Timeout in seconds.
    """

    ranks: int
    per_node: int
    rows: int
    names: int
    pause: float
    limit: float


def play(rank: int, job: Job, port: int, directory: str) -> NoReturn:
    """Open a session, log, finish, and write the results.

    The process ends like a script, without Python's finalisation, which would write to memory that all ranks share.
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
    redirect_errors(Path(directory, f"rank-{rank}.err"))
    warnings = _Warnings()
    logging.getLogger("dist_wandb").addHandler(warnings)
    logging.getLogger("dist_wandb").propagate = False
    found: dict[str, Any] = {"rank": rank}
    with _counted_keys() as keys:
        try:
            _log_rows(rank, job, directory, found)
        except Exception as error:  # noqa: BLE001  # it is reported
            found["error"] = repr(error)
        found.update(keys=keys, cpu=time.process_time(), private_mb=_private_memory(), warnings=warnings.messages)
        Path(directory, f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    atexit._run_exitfuncs()  # noqa: SLF001  # there is no public way
    os._exit(0)


def redirect_errors(path: Path) -> None:
    """Redirect the standard error of this process to a file."""
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())


def _log_rows(rank: int, job: Job, directory: str, found: dict[str, Any]) -> None:
    limits = dist_wandb.Limits(join_timeout=job.limit, finish_timeout=job.limit)
    times: dict[str, float] = found.setdefault("times", {})

    def done(stage: str) -> None:
        times.setdefault(stage, time.monotonic())  # of all processes

    def noting(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            done(stage)
            return result

        return noted

    JobStore.find = noting("store", JobStore.find)  # type: ignore[method-assign]
    opener.learn_layout = noting("layout", opener.learn_layout)  # type: ignore[attr-defined]
    Forming.form = noting("formed", Forming.form)  # type: ignore[method-assign]
    done("started")
    session = dist_wandb.init(project="scale", mode="offline", dir=directory, limits=limits)
    done("opened")
    with common.watching(session) as handed:
        session.log(_row(rank, 0, job), step=0)
        found["flushed"] = session.flush(job.limit)
        done("first_flush")
        for step in range(1, job.rows):
            session.log(_row(rank, step, job), step=step)
            time.sleep(job.pause)
        found["flushed"] &= session.flush(job.limit)
        done("logged")
        session.finish()
        done("finished")
        if session.run:
            found["rows"] = []
            while not handed.empty():
                found["rows"].append(handed.get().row)


def _private_memory() -> float | None:
    """Return the private memory of this process in MiB; `None` if the system does not report it."""
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024
    return None


def _row(rank: int, step: int, job: Job) -> dict[str, float]:
    return common.numbers(job.names, float(rank + step))


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage()[:300])


class _counted_keys:  # noqa: N801  # used as a function
    """Count the keys that this process requests from the store."""

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
        """Do nothing: the process ends."""
