"""Units whose ranks are threads of this process, with real gloo groups over a store in memory."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from counting import CountedStore, Counts
from limits import set_limits
from torch.distributed import HashStore, Store

from dist_wandb.exchange import collective, interface
from dist_wandb.exchange.collective import CollectiveExchange
from dist_wandb.exchange.interface import Exchange, Hooks
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.devices import HostCopy, Later
from dist_wandb.payloads.gathers import Gathered
from dist_wandb.payloads.scalars import copied_row
from dist_wandb.runs import wandb_media
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import Unit, plan_run
from dist_wandb.settings.reduction import DEGRADED, Definitions, check_reduce

Row = dict[str, Any]
SOON = 20.0  # seconds, on a busy machine; waiting for other ranks takes longer


class Brisk(Limits):
    """Limits of ranks that have many rounds for few rows each."""

    linger: ClassVar[float] = 0.01


class Hasty(Brisk):
    """Limits of ranks that soon give up one that is gone."""

    grace: ClassVar[float] = 1.5


QUICK, HASTY = (kind(join_timeout=30, peer_timeout=30, finish_timeout=60, heartbeat=0.1) for kind in (Brisk, Hasty))


class RecordingRun:
    """Records the logged rows; those that are left open too, once the next one begins."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._open: Row = {}

    def log(self, row: Row, commit: bool | None = None) -> None:
        self._open.update({name: value for name, value in row.items() if name != "_timestamp"})
        if commit is not False and self._open:
            self.rows.append(self._open)
            self._open = {}


class UnitExchange(CollectiveExchange):
    """The exchange of a rank that may die, and whose patience may change."""

    @property
    def kept(self) -> int:
        """How many rows this rank keeps for an absent primary."""
        return len(self.participation.kept)

    def wait_for_peers(self, seconds: float) -> None:
        self.turns.pacer.patience = seconds

    def wait_for_new_names(self, seconds: float) -> None:
        """Change how long new names wait for other ranks."""
        self.turns.pacer.new_name_patience = seconds

    def die(self, *, notice: bool = True) -> None:
        """End as a killed process does: without a last round, and with lost connections."""
        if not notice:  # nor does it publish that it is gone
            self.participation.leave = lambda *_, **__: None  # type: ignore[method-assign]
        self.lifecycle.has_failed = True
        self._ask(stop=True)
        assert self.lifecycle.ended.wait(SOON)


class PatientExchange(UnitExchange):
    """Waits for all ranks even for a new name: values that a test logs on one rank after another belong together."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.turns.pacer.new_name_patience = math.inf


def _itself(job_store: JobStore) -> JobStore:
    return job_store


@dataclass
class Ranks:
    """The ranks of one unit; rank 0 writes."""

    size: int
    limits: Limits = QUICK  # limits of the ranks
    # pass `UnitExchange` to write new names after five heartbeats, even if some ranks have not logged them
    kind: type[UnitExchange] = PatientExchange
    reduce: Any = "mean"
    spread: Sequence[str] = ()
    axes: Sequence[str] = ()  # names that are x axes of the user
    first: int = 0  # global rank of rank 0 of the unit
    per_node: int | None = None  # number of ranks on each node; all if `None`
    is_opening: Callable[[], bool] = lambda: False  # returns whether rank 0 is still opening its run
    failure: Callable[[], str | None] = lambda: None  # returns why it could not open it
    move: Callable[[int], None] | None = None  # opens the exchange with another primary, given its rank
    store: HashStore = field(default_factory=HashStore)
    store_of: Callable[[int], Store] | None = None  # a separate connection to the store for each rank
    run: RecordingRun = field(default_factory=RecordingRun)
    exchanges: dict[int, UnitExchange] = field(default_factory=dict)

    def open(self, *ranks: int) -> Ranks:
        for rank in ranks or range(self.size):
            here = self.per_node or self.size
            topology = Topology(rank, rank % here, rank // here, self.size, here, self.size // here)
            job_store = JobStore(self.store_of(rank) if self.store_of else self.store, "test", topology, 20)
            plan = plan_run(topology, "auto", "global", "exp")
            run: Any = self.run if rank == 0 else NullRun()
            writer = RunWriter(run, plan, "global_step")
            definitions = functools.partial(Definitions, axes=dict.fromkeys(self.axes, 0))
            arguments: dict[str, Any] = {"spread": self.spread, "definitions": definitions, "index": rank}
            rows = Rows(writer, check_reduce(self.reduce), rank=rank, **arguments)
            unit = Unit("", rank, self.size, self.first + rank, range(self.first, self.first + self.size))
            find = functools.partial(_itself, job_store)
            hooks = Hooks(find, is_opening=self.is_opening, failure=self.failure, move=self.move)
            self.exchanges[rank] = self.kind(unit, hooks, rows, self.limits)
            self.exchanges[rank].start()
        return self

    def log(self, rank: int, metrics: Row, step: int | None = None, weight: Any = None, calls: int = 0) -> None:
        for value in metrics.values():
            if isinstance(value, Gathered):
                value.use(rank, wandb_media.image)
        x = -1 - calls if step is None else step
        self.exchanges[rank].put(Contribution(copied_row(metrics, rank), step, True, weight, x))

    def log_all(self, values: Row | Callable[[int], Row], step: int, ranks: Iterable[int] | None = None) -> None:
        """Log a row on some ranks; by default on all that have opened their session."""
        for rank in self.exchanges if ranks is None else ranks:
            self.log(rank, values(rank) if callable(values) else values, step)

    def write_all(self, values: Row | Callable[[int], Row], step: int) -> None:
        """Log a row on all ranks, and wait until it is written."""
        self.log_all(values, step)
        self.flush()

    def together(self, action: Callable[[UnitExchange], Any], *ranks: int) -> list[Any]:
        exchanges = [self.exchanges[rank] for rank in ranks or self.exchanges]
        with ThreadPoolExecutor(len(exchanges)) as pool:
            return list(pool.map(action, exchanges))

    def flush(self, *ranks: int) -> None:
        assert all(self.together(lambda exchange: exchange.flush(), *ranks))

    def close(self, *ranks: int) -> None:
        assert all(self.together(lambda exchange: exchange.close(), *ranks))

    def lose_soon(self, peer_timeout: float) -> None:
        """Lose ranks that keep the others waiting for so long, in this generation only."""
        for exchange in self.exchanges.values():
            group: Any = exchange.group
            group.timeout = peer_timeout
        self.pass_rounds()

    def pass_rounds(self) -> None:
        """Wait until a whole round has passed on all ranks."""
        before = {rank: exchange.rounds.table.round for rank, exchange in self.exchanges.items()}
        eventually(lambda: all(self.exchanges[rank].rounds.table.round > old + 1 for rank, old in before.items()))

    def last(self, name: str) -> dict[int, Any]:
        """Return the last value written under a name, by step."""
        return {row["global_step"]: row[name] for row in self.run.rows if name in row}

    def flagged(self) -> dict[int, int]:
        return self.last(DEGRADED)


@contextmanager
def making() -> Iterator[Callable[..., Ranks]]:
    """Return a function that creates units, and end their threads afterwards."""
    made: list[Ranks] = []

    def make(size: int, *present: int, **arguments: Any) -> Ranks:
        made.append(Ranks(size, **arguments))
        return made[-1].open(*present)

    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, interface, LAST_WRITES=20.0)
        set_limits(patch, collective, _LAST_WAIT=10.0)  # a thread may be held up, also at its end
        yield make
        for unit in made:
            unit.together(lambda exchange: exchange.leave(failed=True))
            assert all(exchange.has_ended for exchange in unit.exchanges.values())


class Stall:
    """Blocks the thread of a rank, as a stopped process would, by a number that does not arrive on the host."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()

    def number(self, *, asked: bool = False) -> Later:
        """Return the number zero; if `asked`, one that also reports whether it is ready."""
        copy = HostCopy([torch.zeros(())])
        copy.tensor = self._wait  # type: ignore[method-assign]
        if asked:
            copy.is_ready = self.over.is_set  # type: ignore[method-assign]
        return Later(copy, 0)

    def _wait(self) -> torch.Tensor:
        self.begun.set()
        self.over.wait(60)
        return torch.zeros(1)


def waiting_for(event: threading.Event, store: Store, key: str, *, reads: bool) -> Callable[[int], Store]:
    """Return what makes the ranks' accesses to a store that answers reads, or writes, of a key only after an event."""

    def wait(asked: str, value: object) -> None:
        assert not (asked.endswith(key) and reads == (value is None)) or event.wait(SOON)

    return lambda rank: CountedStore(store, rank, Counts(), wait)


def live_exchanges() -> list[Exchange]:
    """Return the exchanges of this process whose threads may run."""
    return [exchange for exchange in interface.live if not exchange.has_ended]


def eventually(condition: Callable[[], object], within: float = 30) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def threads_of_gloo() -> int:
    """Return the number of threads of this process that wait for messages of other members."""
    number = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that ends meanwhile
            number += path.read_text() == "gloo_tcp_loop\n"
    return number
