"""Growth of the exchange with the number of ranks, 2 to 64, and with the number of names, 1 to 500.

The ranks are `CollectiveExchange`s of one process, assembled as in a session. Each has its own thread, and its own
group over a `HashStore`. Rows follow one at a time: every rank puts its row, and the next row follows when rank 0 has
passed this one to its writer, which writes nothing. So the counts are those of steady state and lockstep:

- collectives per row: `GlooGroup.collectives` of the rank that used most. Names are exchanged before.
- bytes per row and rank: `GlooGroup.bytes_given` of the rank that passed most bytes to collectives.
- milliseconds per row: from the put of the last rank until the row is passed to the writer. All ranks share the cores
  and the interpreter of this process, so this is an upper bound, and grows with the number of ranks.

Each repeat forms a new group; sizes alternate. A repeat is left out, with a note, if its group broke and the ranks
formed a new one: its counts would include those of re-forming.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, ClassVar

from benchmarks import common

from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.interface import Hooks
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.transport.gloo import GlooGroup
from dist_wandb.exchange.transport.tree import TreeGroup
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import plan_run, unit_of
from dist_wandb.settings.reduction import check_reduce

_RANKS = (2, 4, 8, 16, 32, 64)
_NAMES = (1, 10, 100, 500)
_USUAL_NAMES = 20
_TIMEOUT = 60.0


class _Prompt(Limits):
    linger: ClassVar[float] = 0.0


_LIMITS = _Prompt(heartbeat=10.0)  # only rounds of rows while counting


@dataclass(frozen=True)
class Cost:
    """The cost of a row."""

    collectives: float
    bytes: float
    milliseconds: float


_TITLES = {
    "collectives": "collectives per row",
    "bytes": "bytes per row and rank",
    "milliseconds": "milliseconds per row",
}


def measure(options: common.Options) -> common.Result:
    """Put rows through units of several sizes, alternating."""
    sizes = {f"{ranks} ranks, {_USUAL_NAMES} names": (ranks, _USUAL_NAMES) for ranks in _RANKS}
    names = {f"2 ranks, {count} names": (2, count) for count in _NAMES}
    if options.quick:
        sizes = dict(list(sizes.items())[:3])
    cases = {**sizes, **names}
    found: dict[str, list[Cost]] = {case: [] for case in cases}
    result = common.Result("growth")
    for case in common.alternating(list(cases), options.repeats):
        cost = cost_of(*cases[case], rows=options.of(50, 5))
        if cost is None:
            result.notes.append(f"{case}: the group broke in one repeat, though all ranks took part")
        else:
            found[case].append(cost)
    for what, title in _TITLES.items():
        result.add(title, {case: [getattr(cost, what) for cost in costs] for case, costs in found.items()})
    _add_targets(result, {case: found[case] for case in sizes}, found)
    return result


def _add_targets(result: common.Result, by_ranks: dict[str, list[Cost]], every: dict[str, list[Cost]]) -> None:
    two, four, *_, largest = by_ranks
    most = [cost.collectives for costs in every.values() for cost in costs]
    smallest = {"collectives": four, "bytes": two}  # two ranks need only one collective
    missing = [case for case, costs in every.items() if not costs]
    result.targets.append(common.Target("most collectives per row", 2.0, None if missing else max(most)))
    for what, small in smallest.items():
        growth = result.ratio(_TITLES[what], largest, small) if all(by_ranks.values()) else None
        ranks = f"{largest.partition(',')[0]} / {small.partition(',')[0]}"
        result.targets.append(common.Target(f"{_TITLES[what]}, {ranks}", 1.0, growth))


def cost_of(ranks: int, names: int, rows: int) -> Cost | None:
    """Form a unit, put rows through it, and end it; return `None` if its group broke."""
    unit = _Unit(ranks)
    try:
        row = common.numbers(names)
        for step in range(3):  # the first row includes joining and the exchange of names
            unit.exchange(row, step)
        groups = unit.groups()
        before = _counts(groups)
        times = [unit.exchange(row, 3 + step) for step in range(rows)]
        if groups != unit.groups() or len(groups) < ranks:
            return None
        after = _counts(groups)
    finally:
        unit.close()
    collectives, handed = (max(b - a for a, b in zip(*both, strict=True)) for both in zip(before, after, strict=True))
    return Cost(collectives / rows, handed / rows, 1000 * statistics.median(times))


def _counts(groups: list[GlooGroup | TreeGroup]) -> tuple[list[int], list[int]]:
    """Return collectives and bytes of each rank so far."""
    return [group.collectives for group in groups], [group.bytes_given for group in groups]


class _Unit:
    """A unit whose ranks are threads of this process."""

    def __init__(self, ranks: int) -> None:
        from torch.distributed import HashStore

        self._written: SimpleQueue[float] = SimpleQueue()
        store = HashStore()
        self._exchanges = [self._exchange(store, rank, ranks) for rank in range(ranks)]

    def exchange(self, row: dict[str, float], step: int) -> float:
        """Put a row on every rank; return the seconds from the last put until it is written."""
        for exchange in self._exchanges:
            exchange.put(Contribution(row, step, commit=True))
        last = time.perf_counter()
        return self._written.get(timeout=_TIMEOUT) - last

    def groups(self) -> list[GlooGroup | TreeGroup]:
        """Return the groups of the ranks that have one, after waiting for pending rows."""
        deadline = time.monotonic() + _TIMEOUT
        while any(exchange.rounds.busy for exchange in self._exchanges) and time.monotonic() < deadline:
            time.sleep(0.001)
        groups = [exchange.group for exchange in self._exchanges]
        return [group for group in groups if isinstance(group, (GlooGroup, TreeGroup))]

    def close(self) -> None:
        """Close all ranks at once because they wait for each other; end all threads."""
        with ThreadPoolExecutor(len(self._exchanges)) as pool:
            list(pool.map(lambda exchange: exchange.close(), self._exchanges))
        for exchange in self._exchanges:
            exchange.leave()

    def _exchange(self, store: Any, rank: int, ranks: int) -> CollectiveExchange:
        topology = Topology(rank, rank, 0, ranks, ranks, 1)
        plan = plan_run(topology, "auto", "global", "growth")
        rows = Rows(RunWriter(self._run(), plan, "global_step"), check_reduce("mean"), index=rank)
        job_store = JobStore(store, "growth", topology, _TIMEOUT)
        exchange = CollectiveExchange(unit_of(topology, "global"), Hooks(lambda: job_store), rows, _LIMITS)
        exchange.start()
        return exchange

    def _run(self) -> Any:
        """Replaces rank 0's W&B run; records the time of a row, and drops it."""
        written = self._written

        class Run:
            def log(self, _row: dict[str, Any]) -> None:
                written.put(time.perf_counter())

        return Run()


def _no_job(_arguments: dict[str, Any]) -> None:
    """All ranks are threads of this process."""


if __name__ == "__main__":
    common.main(measure, _no_job, __doc__)
