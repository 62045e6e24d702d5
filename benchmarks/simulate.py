"""Simulate a job of many ranks in one thread: the use of the job's store by each rank, and the cost of a row.

    python -m benchmarks.simulate --ranks 512 [--kill 8 9 10 | --late 8 9 10]
    python -m benchmarks.simulate --all  # the data of docs/evidence.md; a quarter of an hour of processor time, 18 GiB

The code of the package runs on a simulated clock over a store and process groups in memory (tests/support/simulation).
A message takes 0.1 ms, a call of the store 0.2 ms; nothing else takes time on that clock. Ranks start within 3 s, eight
per node, open sessions, log rows of 20 numbers and finish; the ranks of ``--kill`` are killed after ten rows, a second
before the others log the next one. Those of ``--late`` start after `join_timeout` (5 s here) of the others, and log the
last row with them.

The output is JSON: keys and bytes requested from the store, by rank; messages and bytes that a rank sends for a row,
and levels of the tree; seconds on the simulated clock until the last rank had opened its session, from the deaths until
the last rank had flushed the next row, and for `finish`; the number of contributors of that row; and the processor time
of a row for each rank, including that of the simulation. ``--all`` writes the results to
benchmarks/measured/simulated.json.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from benchmarks import common

from dist_wandb.exchange import transport as groups
from dist_wandb.exchange.transport import tree
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.session import opener, registry
from dist_wandb.session.session import Session
from dist_wandb.settings.options import Limits, Options

sys.path.insert(0, str(common.ROOT / "tests" / "support"))
from simulation import Store, World, simulated

_LOADED = tree  # before names in it are replaced
_PER_NODE = 8
_ROWS = 10
_NAMES = 20
_PATIENCE = 5.0  # seconds that ranks wait for late ones
_LATE = 8.0  # seconds after the others
_LAST_ROW = 20.0  # seconds after the start of the first rank, if ranks are late
_SIZES = (2, 8, 64, 512, 1024, 4096, 16384)
_MOST_WITH_EVENTS = 1024  # ranks

MEASURED = common.ROOT / "benchmarks" / "measured" / "simulated.json"


class Job:
    """A simulated job.

    Args:
        ranks: Number of ranks.
        killed: Ranks that are killed after ten rows.
        late: Ranks that start late.
    """

    def __init__(self, ranks: int, killed: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        self.world = World(message=1e-4, call=2e-4)
        self.ranks, self.killed, self.late = ranks, killed, frozenset(late)
        self.members = 0  # of the last row
        self.values: dict[str, bytes] = {}
        self.counts = [Counter[str]() for _ in range(ranks)]
        self.times: dict[str, list[float]] = {name: [] for name in ("opened", "flushed", "logged", "again", "finished")}
        self.delivered = 0
        self.marks: dict[str, tuple[int, int]] = {}

    def find(self, namespace: str, topology: Topology, timeout: float, *, lasting: bool = False) -> JobStore:
        """Replace `JobStore.find`."""
        counts: Any = Store(self.values, self.counts[topology.global_rank])
        return JobStore(counts, namespace + "/all" * lasting, topology, timeout)

    def use(self, rank: int) -> None:
        """Run one rank."""
        per_node = min(_PER_NODE, self.ranks)
        topology = Topology(rank, rank % per_node, rank // per_node, self.ranks, per_node, self.ranks // per_node)
        session = opener.open_session(
            Options(limits=Limits(join_timeout=_PATIENCE)) if self.late else Options(),
            {"mode": "disabled"},
            integration="simulated",
            topology=topology,
            number=1,
            create_new=False,
            may_restart=False,
            led_by_trainer=True,
        )
        self._reached("opened")
        for step in range(_ROWS if rank in self.late else 0, _ROWS + 1):
            if step == _ROWS:
                self._reached("logged")
                self.world.pause(_LAST_ROW - self.world.now if self.late else 1.0)
            session.log(common.numbers(_NAMES, float(rank + step)), step=step)
            if step in (0, _ROWS):
                delivered = session.flush()
                self.delivered += delivered
                self._reached("flushed" if not step else "again")
                self.members = max(self.members, _members(session))
            self.world.pause(0.2)
        session.finish()
        self._reached("finished")

    def _reached(self, what: str) -> None:
        self.times[what].append(self.world.now)

    def play(self) -> dict[str, Any]:
        """Run the job; return the results."""
        world, times = self.world, self.times
        left, early = self.ranks - len(self.killed), self.ranks - len(self.late)
        for rank in range(self.ranks):
            begin = world.random.uniform(0.0, 3.0) + (_LATE if rank in self.late else 0.0)
            world.start(rank, functools.partial(self.use, rank), begin)
        world.run(lambda: len(times["flushed"]) == early)
        messages, sent, began = Counter(world.messages), Counter(world.sent), time.process_time()
        world.run(lambda: len(times["logged"]) == self.ranks)
        rows_took = time.process_time() - began
        for_row = [(world.messages - messages)[rank] / (_ROWS - 1) for rank in range(self.ranks)]
        bytes_for_row = [(world.sent - sent)[rank] / (_ROWS - 1) for rank in range(self.ranks)]
        killed_at = _LAST_ROW if self.late else world.now
        self.members = 0
        world.kill(*self.killed)
        world.run(lambda: len(times["finished"]) == left)
        nodes = [rank // _PER_NODE for rank in range(self.ranks)]
        return {
            "ranks": self.ranks,
            "killed": list(self.killed),
            "late": sorted(self.late),
            "delivered": [self.delivered, early + left],
            "members": [self.members, left],
            "keys": _spread([counts["keys"] for counts in self.counts]),
            "bytes": _spread([counts["bytes"] for counts in self.counts]),
            "messages_of_a_row": _spread(for_row),
            "bytes_of_a_row": _spread(bytes_for_row),
            "levels": groups.tree_of(range(self.ranks), nodes, 0, groups.FAN_OUT)[1],
            "opened": round(max(times["opened"]), 3),
            "last_row": round(max(times["again"]) - killed_at, 3),
            "finish": round(max(times["finished"]) - max(times["again"]), 3),
            "cpu_of_a_row_per_rank": round(rows_took / (_ROWS - 1) / self.ranks, 6),
        }


def _members(session: Session) -> int:
    """Return the number of members of a session's exchange, which has no public attribute."""
    exchange: Any = session._exchange  # noqa: SLF001
    generation = exchange.participation.generation
    return len(generation.members) if generation is not None else 1


def simulate(ranks: int, killed: Sequence[int] = (), late: Sequence[int] = ()) -> dict[str, Any]:
    """Run one job; return the results.

    Args:
        ranks: Number of ranks.
        killed: Ranks that are killed after ten rows.
        late: Ranks that start late.
    """
    job = Job(ranks, killed, late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobStore, "find", staticmethod(job.find))
        for name in ("add", "remove"):  # a real rank has its own process
            patch.setattr(registry, name, lambda *_: None)
        with simulated(job.world):
            return job.play()


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    mean, median = statistics.fmean(numbers), statistics.median(numbers)
    return {"mean": round(mean, 1), "median": round(median, 1), "most": round(max(numbers), 1)}


def _play_all() -> None:
    """Run the jobs of docs/evidence.md, each in a separate process, and write the results."""
    found = []
    for ranks in _SIZES:
        node = [str(rank) for rank in range(_PER_NODE, 2 * _PER_NODE)]
        events = [[], ["--kill", "9"], ["--kill", "8"], ["--kill", *node], ["--late", *node]]
        for event in events if 2 * _PER_NODE < ranks <= _MOST_WITH_EVENTS else events[:1]:
            command = [sys.executable, "-m", "benchmarks.simulate", "--ranks", str(ranks), *event]
            printed = subprocess.run(command, cwd=common.ROOT, stdout=subprocess.PIPE, check=True, text=True)
            found.append(json.loads(printed.stdout))
            MEASURED.parent.mkdir(exist_ok=True)
            MEASURED.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Simulate one job, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="ranks that are killed after ten rows")
    parser.add_argument("--late", type=int, nargs="*", default=[], help="ranks that start late")
    parser.add_argument("--all", action="store_true", help="run all jobs of docs/evidence.md")
    given = parser.parse_args()
    if given.all:
        _play_all()
        return
    torch.set_num_threads(1)
    logging.getLogger("dist_wandb").setLevel(logging.ERROR)
    gc.disable()
    print(json.dumps(simulate(given.ranks, given.kill, given.late)))


if __name__ == "__main__":
    main()
