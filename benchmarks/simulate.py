"""One job of many ranks, simulated in one thread: what each asks of the job's store, and what a row costs.

    python -m benchmarks.simulate --ranks 512 [--kill 8 9 10]

The product's own code runs, on a clock of its own, over a store and process groups in memory
(tests/support/simulation). A message takes 0.1 ms, a call of the store 0.2 ms; nothing else takes time on that clock.
Ranks come within 3 s, eight to a node, open sessions, log rows of 20 numbers and finish; the ranks of ``--kill`` are
killed after ten rows, a second before the others log the next one.

It prints JSON: keys and bytes asked of the store, by rank; messages and bytes that a rank sends for a row, and levels
of the tree; seconds on the job's clock until the last rank had opened, from the deaths until the last rank had flushed
the next row, and for `finish`; and the processor time of a row for each rank, that of the simulation included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from benchmarks import common

from dist_wandb.exchange.transport import layout, tree
from dist_wandb.session import opener, registry
from dist_wandb.settings.options import Options
from dist_wandb.store.job_store import JobStore
from dist_wandb.topology.model import Topology

sys.path.insert(0, str(common.ROOT / "tests" / "support"))
from simulation import Store, World, simulated

_LOADED = tree  # before names in it are replaced
_PER_NODE = 8
_ROWS = 10
_NAMES = 20


class Job:
    """A job in a world.

    Args:
        ranks: How many there are.
        killed: Those that are killed after ten rows.
    """

    def __init__(self, ranks: int, killed: Sequence[int]) -> None:
        self.world = World(message=1e-4, call=2e-4)
        self.ranks, self.killed = ranks, killed
        self.values: dict[str, bytes] = {}
        self.counts = [Counter[str]() for _ in range(ranks)]
        self.times: dict[str, list[float]] = {name: [] for name in ("opened", "flushed", "logged", "again", "finished")}
        self.delivered = 0
        self.marks: dict[str, tuple[int, int]] = {}

    def find(self, namespace: str, topology: Topology, timeout: float, *, lasting: bool = False) -> JobStore:
        """In place of `JobStore.find`."""
        counts: Any = Store(self.values, self.counts[topology.global_rank])
        return JobStore(counts, namespace + "/all" * lasting, topology, timeout)

    def use(self, rank: int) -> None:
        """What a rank does."""
        per_node = min(_PER_NODE, self.ranks)
        topology = Topology(rank, rank % per_node, rank // per_node, self.ranks, per_node, self.ranks // per_node)
        session = opener.open_session(
            Options(),
            {"mode": "disabled"},
            integration="simulated",
            topology=topology,
            number=1,
            create_new=False,
            announces=False,
            catches_sigterm=False,
            restarts=False,
        )
        self._reached("opened")
        for step in range(_ROWS + 1):
            if step == _ROWS:
                self._reached("logged")
                self.world.pause(1.0)
            session.log(common.numbers(_NAMES, float(rank + step)), step=step)
            if step in (0, _ROWS):
                delivered = session.flush()
                self.delivered += delivered
                self._reached("flushed" if not step else "again")
            self.world.pause(0.2)
        session.finish()
        self._reached("finished")

    def _reached(self, what: str) -> None:
        self.times[what].append(self.world.now)

    def play(self) -> dict[str, Any]:
        """Play it; what was found."""
        world, times = self.world, self.times
        left = self.ranks - len(self.killed)
        for rank in range(self.ranks):
            world.start(rank, functools.partial(self.use, rank), world.random.uniform(0.0, 3.0))
        world.run(lambda: len(times["flushed"]) == self.ranks)
        messages, sent, began = Counter(world.messages), Counter(world.sent), time.process_time()
        world.run(lambda: len(times["logged"]) == self.ranks)
        rows_took = time.process_time() - began
        for_row = [(world.messages - messages)[rank] / (_ROWS - 1) for rank in range(self.ranks)]
        bytes_for_row = [(world.sent - sent)[rank] / (_ROWS - 1) for rank in range(self.ranks)]
        killed_at = world.now
        world.kill(*self.killed)
        world.run(lambda: len(times["finished"]) == left)
        nodes = [rank // _PER_NODE for rank in range(self.ranks)]
        return {
            "ranks": self.ranks,
            "killed": list(self.killed),
            "delivered": [self.delivered, self.ranks + left],
            "keys": _spread([counts["keys"] for counts in self.counts]),
            "bytes": _spread([counts["bytes"] for counts in self.counts]),
            "messages_of_a_row": _spread(for_row),
            "bytes_of_a_row": _spread(bytes_for_row),
            "levels": layout.tree_of(range(self.ranks), nodes, 0, layout.FAN_OUT).levels,
            "opened": round(max(times["opened"]), 3),
            "next_row_after_deaths": round(max(times["again"]) - killed_at, 3),
            "finish": round(max(times["finished"]) - max(times["again"]), 3),
            "cpu_of_a_row_per_rank": round(rows_took / (_ROWS - 1) / self.ranks, 6),
        }


def _spread(numbers: Sequence[float]) -> dict[str, float]:
    mean, median = statistics.fmean(numbers), statistics.median(numbers)
    return {"mean": round(mean, 1), "median": round(median, 1), "most": round(max(numbers), 1)}


def main() -> None:
    """Simulate one job, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--kill", type=int, nargs="*", default=[], help="ranks that are killed after ten rows")
    told = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dist_wandb").setLevel(logging.ERROR)
    gc.disable()
    job = Job(told.ranks, told.kill)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobStore, "find", staticmethod(job.find))
        for name in ("add", "remove"):  # each rank has a process of its own
            patch.setattr(registry, name, lambda _: None)
        with simulated(job.world):
            print(json.dumps(job.play(), indent=2))


if __name__ == "__main__":
    main()
