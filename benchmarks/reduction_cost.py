"""Cost of reducing values of two ranks: this package's exchange compared with other ways.

Two things are reduced over two gloo processes: 20 weighted means, and a MetricCollection of ten classification metrics
(with compute groups) that has seen one batch of 256 samples per rank. The ways:

- torchmetrics: ``compute()`` of 20 `MeanMetric`, or of the collection, which synchronises automatically.
- all_reduce per key: one all_reduce per mean, or per state of the leader of each compute group; then `compute`.
- one all_gather_object: of a dictionary with all sums and weights, or all states of the leaders; then `compute`.
- dist_wandb: from `Session.log`, followed by `flush` on both ranks, until rank 0's `wandb.Run.log` was called with the
  reduced row ("reduced"), and until that call has returned ("written"). Means are logged as floats with a weight, and
  as `MeanMetric` objects.

Both ranks start together after a barrier; updates of the metrics before it are not measured. A repeat is a block of
such reductions, and its number is their median on rank 0. All blocks alternate within one job. The benchmark first
checks that all ways have the same results. Collectives are counted on rank 0, per reduction: for the peers by wrapping
those of `torch.distributed`, for this package by its own count.

The stream is measured separately: rows of 20 weighted means in a tight loop, until all are written, per row.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from benchmarks import common

from dist_wandb.errors import DistWandbError
from dist_wandb.settings.options import Limits

if TYPE_CHECKING:
    import torch
    from torchmetrics import MeanMetric, Metric, MetricCollection

    from dist_wandb.session.session import Session

_MEANS, _CLASSES, _SAMPLES = 20, 10, 256
_THINGS = ("20 means", "collection")
_TORCHMETRICS, _PER_KEY, _GATHER = "torchmetrics", "all_reduce per key", "one all_gather_object"
_REDUCED, _WRITTEN = "dist_wandb, reduced", "dist_wandb, written"
_OBJECTS_REDUCED, _OBJECTS_WRITTEN = (
    "dist_wandb, MeanMetric objects, reduced",
    "dist_wandb, MeanMetric objects, written",
)
_TIMES = "one reduction, median milliseconds"
_COLLECTIVES = "collectives per reduction"
_STREAM = "stream of rows of 20 means, milliseconds per row"


def measure(options: common.Options) -> common.Result:
    """Run one job of two ranks, which measures all blocks."""
    arguments = {"repeats": options.repeats, "calls": options.of(50, 3), "stream": options.of(500, 20)}
    found = common.run_ranks(__file__, arguments)[0]
    result = common.Result("reduction_cost", notes=found["notes"])
    result.add(_TIMES, found["milliseconds"], against=_TORCHMETRICS)
    result.add(_COLLECTIVES, found["collectives"], against=_TORCHMETRICS)
    result.add(_STREAM, {"dist_wandb": found["stream"]})
    for thing, least in zip(_THINGS, (20.0, 5.0), strict=True):
        times = result.ratio(_TIMES, f"{thing}: {_TORCHMETRICS}", f"{thing}: {_WRITTEN}")
        result.targets.append(
            common.Target(f"{thing}: torchmetrics / dist_wandb until written", least, times, at_least=True)
        )
    return result


class Reduced(NamedTuple):
    """The result of one reduction on rank 0.

    Args:
        values: The reduced numbers, in any order.
        seconds: Durations in seconds, by name.
    """

    values: list[float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Way:
    """A way to reduce something.

    Args:
        reduce: Performs one reduction.
        session: The session that performs it; `None` for the peers.
    """

    reduce: Callable[[], Reduced]
    session: Session | None = None


def job(arguments: dict[str, Any]) -> None:
    """Run one rank: all blocks, alternating."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, directory = dist.get_rank(), arguments["directory"]
    found: dict[str, Any] = {"milliseconds": {}, "collectives": {}, "notes": []}
    with contextlib.ExitStack() as stack:
        opened = partial(_open, directory, stack)
        for thing, subject in zip(_THINGS, (Means(rank), Collection(rank)), strict=True):
            _measure_thing(thing, subject, {**subject.peers(), **subject.ours(opened)}, arguments, found)
        exchange = opened()
        found["stream"] = [_stream(exchange, arguments["stream"]) for _ in range(arguments["repeats"])]
    common.report(directory, rank, found)
    dist.destroy_process_group()


def _measure_thing(
    thing: str,
    subject: Subject,
    ways: dict[str, Way],
    arguments: Mapping[str, Any],
    found: dict[str, Any],
) -> None:
    """Count, check and time the ways of one thing. Ways that do not work are left out, with a note."""
    counts: dict[str, int] = {}
    for name in list(ways):
        count = _count(subject, ways[name])
        if isinstance(count, int):
            counts[name] = count
        else:
            found["notes"].append(f"{thing}, {name}: {count}")
            del ways[name]
    times: dict[str, list[float]] = {}
    for name in common.alternating(list(ways), arguments["repeats"]):
        for timed, seconds in _block(subject, ways[name], arguments["calls"]).items():
            times.setdefault(timed, []).append(1000 * seconds)
            found["collectives"].setdefault(f"{thing}: {timed}", []).append(counts[name])
    found["milliseconds"].update({f"{thing}: {timed}": numbers for timed, numbers in times.items()})


def _block(subject: Subject, way: Way, calls: int) -> dict[str, float]:
    """Return the medians over a number of reductions."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {}
    for _ in range(calls):
        subject.update()
        dist.barrier()
        for name, took in way.reduce().seconds.items():
            seconds.setdefault(name, []).append(took)
        dist.barrier()  # no rank prepares the next reduction while another rank is still in this one
    return {name: statistics.median(times) for name, times in seconds.items()}


def _count(subject: Subject, way: Way) -> int | str:
    """Return the collectives of one reduction after a first one for names; or the problem if values are wrong."""
    import torch.distributed as dist

    for _ in range(2):
        subject.update()
        dist.barrier()
        before = 0 if way.session is None else common.collectives_of(way.session)
        with _counted() as collectives:
            problem = _problem(subject, way)
        count = collectives[0] if way.session is None else common.collectives_of(way.session) - before
        told: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, problem)
        problem = next(filter(None, told), None)
        if problem:
            return problem
    return count


def _problem(subject: Subject, way: Way) -> str | None:
    """Return why a way does not have the expected values; `None` if it does."""
    import torch.distributed as dist

    try:
        values, expected = way.reduce().values, subject.expected()
    except (DistWandbError, Empty, NotImplementedError) as error:
        return f"{type(error).__name__} {error}"
    pairs = zip(sorted(values), sorted(expected), strict=False)
    if dist.get_rank() != 0:
        return None
    if len(values) != len(expected) or not all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) for a, b in pairs):
        return f"expected {len(expected)} reduced numbers {expected}, got {values}"
    return None


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the calls of collectives of `torch.distributed` in this process, by any caller."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    count = [0]

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            return collective(*args, **kwargs)

        return counted

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "barrier", "broadcast", "gather", "reduce"):
            for module in (dist, distributed_c10d):
                stack.enter_context(patch.object(module, name, counting(getattr(distributed_c10d, name))))
        yield count


# This package's way


@dataclass(frozen=True)
class Exchange:
    """A session, and the rows that it passes to wandb."""

    session: Session
    handed: SimpleQueue[common.Handed]

    def way(self, names: tuple[str, str], make: Callable[[], tuple[dict[str, Any], Any]]) -> Way:
        """Return the way to reduce the row that `make` returns, with its weight.

        Args:
            names: Names of the times until the row is reduced, and until it is written.
            make: Makes the row and its weight; not included in the times.
        """

        def reduce() -> Reduced:
            row, weight = make()
            start = time.time()
            self.session.log(row, weight=weight)
            self.session.flush()  # immediately, like the peers; otherwise rows in quick succession are combined
            if not self.session.run:
                return Reduced([], {})
            written = self.handed.get(timeout=30)
            values = [value for name, value in written.row.items() if name != "global_step" and _is_number(value)]
            return Reduced(values, dict(zip(names, (written.began - start, written.ended - start), strict=True)))

        return Way(reduce, self.session)


def _open(directory: str, stack: contextlib.ExitStack) -> Exchange:
    """Open a separate session for each measurement because each round carries all names that its session knows.

    The session has no heartbeat while it is idle because the others are being measured.
    """
    import dist_wandb

    session = stack.enter_context(
        dist_wandb.init(project="reduction_cost", dir=directory, limits=Limits(heartbeat=600.0), reinit="create_new")
    )
    return Exchange(session, stack.enter_context(common.watching(session)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _stream(exchange: Exchange, rows: int) -> float:
    """Return the milliseconds per row for rows logged in a tight loop."""
    import torch.distributed as dist

    row = common.numbers(_MEANS)
    exchange.session.log(row)  # names are exchanged once
    exchange.session.flush()
    while not exchange.handed.empty():
        exchange.handed.get()
    dist.barrier()
    last = start = time.time()
    for _ in range(rows):
        exchange.session.log(row, weight=2.0)
    for _ in range(rows if exchange.session.run else 0):
        last = exchange.handed.get(timeout=60).ended
    return 1000 * (last - start) / rows


# The things to reduce


class Subject:
    """A thing to reduce over ranks, in several ways."""

    def update(self) -> None:
        """Update the values, so that no earlier result can be reused."""
        raise NotImplementedError

    def expected(self) -> list[float]:
        """Return the reduced numbers on rank 0, computed without another rank."""
        raise NotImplementedError

    def peers(self) -> dict[str, Way]:
        """The ways of others."""
        raise NotImplementedError

    def ours(self, opened: Callable[[], Exchange]) -> dict[str, Way]:
        """The ways of this package."""
        raise NotImplementedError


class Means(Subject):
    """20 weighted means: rank r contributes 1 + r + k to mean k, with the weight 1 + r."""

    def __init__(self, rank: int) -> None:
        from torchmetrics import MeanMetric

        self._values = common.numbers(_MEANS, 1.0 + rank)
        self._weight = 1.0 + rank
        self._metrics: dict[str, MeanMetric] = {name: MeanMetric() for name in self._values}

    def update(self) -> None:
        """Update the metrics of torchmetrics."""
        for name, metric in self._metrics.items():
            metric.reset()
            metric.update(self._values[name], self._weight)

    def expected(self) -> list[float]:
        """(1 * (1 + k) + 2 * (2 + k)) / 3."""
        return [(3 * index + 5) / 3 for index in range(_MEANS)]

    def peers(self) -> dict[str, Way]:
        """The ways of others."""
        ways = {_TORCHMETRICS: self._by_torchmetrics, _PER_KEY: self._by_key, _GATHER: self._by_gathering}
        return {name: _timed(name, way) for name, way in ways.items()}

    def ours(self, opened: Callable[[], Exchange]) -> dict[str, Way]:
        """Return the ways of this package: as floats with a weight, and as torchmetrics' objects."""
        return {
            _WRITTEN: opened().way((_REDUCED, _WRITTEN), lambda: (self._values, self._weight)),
            _OBJECTS_WRITTEN: opened().way(
                (_OBJECTS_REDUCED, _OBJECTS_WRITTEN),
                lambda: (dict(self._metrics), None),
            ),
        }

    def _by_torchmetrics(self) -> list[float]:
        return [float(metric.compute()) for metric in self._metrics.values()]

    def _by_key(self) -> list[float]:
        import torch
        import torch.distributed as dist

        reduced = []
        for value in self._values.values():
            both = torch.tensor([self._weight * value, self._weight], dtype=torch.float64)
            dist.all_reduce(both)
            reduced.append(float(both[0] / both[1]))
        return reduced

    def _by_gathering(self) -> list[float]:
        import torch.distributed as dist

        mine = {name: (self._weight * value, self._weight) for name, value in self._values.items()}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        return [sum(rank[name][0] for rank in told) / sum(rank[name][1] for rank in told) for name in mine]


class Collection(Subject):
    """Ten classification metrics in one collection; each rank has its own batch."""

    def __init__(self, rank: int) -> None:
        self._mine, self._merged, self._all = (_collection(synced) for synced in (True, False, False))
        self._batch = _batch(rank)
        self.update()
        for one in (0, 1):
            self._all.update(*_batch(one))
        self._merged.update(*self._batch)
        groups = self._mine.compute_groups.values()
        self._leaders: dict[str, Metric] = {names[0]: _member(self._mine, names[0]) for names in groups}
        self._groups = {names[0]: names for names in groups}

    def update(self) -> None:
        """Update the collection with the batch again."""
        self._mine.reset()
        self._mine.update(*self._batch)

    def expected(self) -> list[float]:
        """Return the results of the collection for the batches of both ranks."""
        return [float(value) for value in self._all.compute().values()]

    def peers(self) -> dict[str, Way]:
        """The ways of others."""
        ways = {_TORCHMETRICS: self._by_torchmetrics, _PER_KEY: self._by_key, _GATHER: self._by_gathering}
        return {name: _timed(name, way) for name, way in ways.items()}

    def ours(self, opened: Callable[[], Exchange]) -> dict[str, Way]:
        """Return the way of this package: the collection itself is logged."""
        return {_WRITTEN: opened().way((_REDUCED, _WRITTEN), lambda: ({"all": self._mine}, None))}

    def _by_torchmetrics(self) -> list[float]:
        return [float(value) for value in self._mine.compute().values()]

    def _by_key(self) -> list[float]:
        import torch.distributed as dist

        states = self._states()
        for of_leader in states.values():
            for name, state in of_leader.items():
                of_leader[name] = state.clone()
                dist.all_reduce(of_leader[name])
        return self._computed(states)

    def _by_gathering(self) -> list[float]:
        import torch.distributed as dist

        mine = self._states()
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        summed = {
            leader: {name: sum(rank[leader][name] for rank in told) for name in states}
            for leader, states in mine.items()
        }
        return self._computed(summed)

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return the states of the leaders of the compute groups; all are tensors that are summed over ranks."""
        return {name: dict(metric.metric_state) for name, metric in self._leaders.items()}

    def _computed(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> list[float]:
        """Return the results of a collection with summed states, without synchronisation."""
        for leader, of_leader in states.items():
            for name in self._groups[leader]:
                metric: Any = _member(self._merged, name)
                metric._computed = None  # noqa: SLF001  # as torchmetrics' own update does
                for state, value in of_leader.items():
                    setattr(metric, state, value)
        return [float(value) for value in self._merged.compute().values()]


def _collection(synced: bool) -> MetricCollection:
    """Return the collection; without compute groups and synchronisation if it should merge given states."""
    from torchmetrics import MetricCollection, classification

    kinds: dict[str, dict[str, Any]] = {
        "MulticlassAccuracy": {},
        "MulticlassPrecision": {},
        "MulticlassRecall": {},
        "MulticlassF1Score": {},
        "MulticlassSpecificity": {},
        "MulticlassHammingDistance": {},
        "MulticlassCohenKappa": {},
        "MulticlassMatthewsCorrCoef": {},
        "MulticlassJaccardIndex": {},
        "MulticlassAUROC": {"thresholds": 100},
    }
    metrics: list[Any] = [
        getattr(classification, kind)(num_classes=_CLASSES, sync_on_compute=synced, **more)
        for kind, more in kinds.items()
    ]
    return MetricCollection(metrics, compute_groups=synced)


def _member(collection: MetricCollection, name: str) -> Metric:
    """Return a metric of the collection itself; usual access returns copies."""
    from torchmetrics import Metric

    member = dict(collection.items(keep_base=True, copy_state=False))[name]
    assert isinstance(member, Metric)  # noqa: S101  # collections are not nested here
    return member


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    logits = torch.randn(_SAMPLES, _CLASSES, generator=generator)
    return logits.softmax(dim=1), torch.randint(_CLASSES, (_SAMPLES,), generator=generator)


def _timed(name: str, way: Callable[[], list[float]]) -> Way:
    def timed() -> Reduced:
        start = time.perf_counter()
        values = way()
        return Reduced(values, {name: time.perf_counter() - start})

    return Way(timed)


if __name__ == "__main__":
    common.main(measure, job, __doc__)
