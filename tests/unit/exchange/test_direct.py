"""A rank's own rows: in order, unchanged, without delaying the training, and never lost silently."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import TWO
from limits import Limit
from torch.distributed import HashStore
from units import Stall, eventually, live_exchanges

from dist_wandb.exchange import direct, interface
from dist_wandb.exchange.direct import DirectExchange, WatchingExchange
from dist_wandb.exchange.interface import Hooks
from dist_wandb.exchange.membership.generations import Generation, GenerationStore, keys_of
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.job.job_store import JobStore
from dist_wandb.job.topology import Topology
from dist_wandb.runs import writer
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import plan_run, unit_of

OWN_THREAD = "dist_wandb-own-rows"
QUICK = Limits(join_timeout=30.0, finish_timeout=30.0)


class Written:
    """A run that remembers its rows, and may stall like a stopped wandb process."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.threads: set[threading.Thread] = set()
        self.commits: list[bool | None] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.during_a_row: Callable[[], None] = lambda: None

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        row = {name: value for name, value in row.items() if name != "_timestamp"}
        during, self.during_a_row = self.during_a_row, lambda: None
        during()
        assert self.goes_on.wait(60)
        if row.get("bad"):
            raise ValueError("bad row")
        self.rows.append(row)
        self.commits.append(commit)
        self.threads.add(threading.current_thread())


class Own:
    """An exchange of own rows, over a run that remembers them."""

    def __init__(self, *, at_once: bool, limits: Limits = QUICK, run: Any = None, **others: Any) -> None:
        self.run: Any = Written()
        plan = plan_run(Topology.single(), "auto", "global", "base")
        opened: Any = self.run if run is None else run
        rows = Rows(RunWriter(opened, plan, "global_step"), None)
        self.exchange = DirectExchange(rows, limits, 0, at_once=at_once, **others)
        self.exchange.start()

    def log(self, step: int, commit: bool | None = None, **values: Any) -> None:
        self.exchange.put(Contribution({"loss": float(step), **values}, step, commit))

    def end(self, how: str) -> None:
        """End it by a method, or by `close` after a failure."""
        self.exchange.close(failed=True) if how == "failed" else getattr(self.exchange, how)()

    @property
    def threads(self) -> set[str]:
        return {"here" if thread is threading.current_thread() else thread.name for thread in self.run.threads}

    @property
    def steps(self) -> list[int]:
        return [row["global_step"] for row in self.run.rows]


@pytest.fixture
def make(limit: Limit) -> Iterator[Callable[..., Own]]:
    made: list[Own] = []

    def make_one(**arguments: Any) -> Own:
        made.append(Own(**arguments))
        return made[-1]

    limit(interface, LAST_WRITES=20.0)
    yield make_one
    for own in made:
        own.run.goes_on.set()
        own.exchange.leave()
        assert own.exchange.has_ended
        assert own.exchange not in live_exchanges()


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == OWN_THREAD}


# --- one thread, in order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False], ids=["here", "thread"])
def test_rows_are_written_in_order_each_by_one_call_of_wandb(make: Callable[..., Own], at_once: bool) -> None:
    own = make(at_once=at_once)
    for step in range(50):
        own.log(step, commit=None if step % 3 else bool(step % 2))
        own.log(step, commit=bool(step % 2), accuracy=1.0)
    assert own.exchange.flush()
    rows = [row for row in own.run.rows if "accuracy" in row]
    assert [row["global_step"] for row in rows] == list(range(50))
    assert own.run.commits == [None] * (50 + sum(step % 3 > 0 or step % 2 > 0 for step in range(50)))
    assert own.threads == ({"here"} if at_once else {OWN_THREAD})


def test_a_rank_without_a_run_has_no_thread(make: Callable[..., Own]) -> None:
    before = own_threads()
    own = make(at_once=False, run=NullRun())
    own.log(0)
    assert own.exchange.flush()
    assert own_threads() <= before, "those of earlier tests may end meanwhile"
    assert own.exchange.close()


@pytest.mark.parametrize("at_once", [True, False], ids=["here", "thread"])
@pytest.mark.parametrize("end", ["flush", "close", "failed", "leave"])
def test_the_row_that_is_left_open_is_written(make: Callable[..., Own], at_once: bool, end: str) -> None:
    own = make(at_once=at_once)
    own.log(1, commit=False)
    own.log(2, commit=False)
    own.log(2, commit=False, accuracy=1.0)
    eventually(lambda: own.steps == [1])
    own.end(end)
    assert own.steps == [1, 2]
    assert own.run.rows[1]["accuracy"] == 1.0


@pytest.mark.parametrize("at_once", [True, False], ids=["here", "thread"])
def test_a_flush_may_leave_the_row_open(make: Callable[..., Own], at_once: bool) -> None:
    own = make(at_once=at_once)
    own.log(1, commit=True)
    own.log(2, commit=False)
    assert own.exchange.flush(commit=False)
    assert own.steps == [1]
    own.log(2, commit=True, accuracy=1.0)
    assert own.exchange.flush()
    assert own.steps == [1, 2]


def test_an_open_row_that_wandb_refuses_at_the_end_is_counted_as_lost(
    make: Callable[..., Own], caplog: pytest.LogCaptureFixture
) -> None:
    own = make(at_once=True)
    own.log(1, commit=False, bad=True)
    assert own.exchange.flush()
    assert not own.exchange.close()
    assert own.steps == []
    assert caplog.text.count("a row of rank 0 could not be written") == 1
    assert "rank 0 has lost values: 2 that W&B refused." in caplog.text


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False], ids=["here", "thread"])
def test_log_does_not_wait_for_a_device_and_rows_stay_in_order(make: Callable[..., Own], at_once: bool) -> None:
    own, stall = make(at_once=at_once), Stall()
    own.log(0)
    own.log(1, accuracy=stall.number(asked=True))
    own.log(2)
    assert not own.exchange.flush(0.05)
    assert own.steps == [0]
    stall.over.set()
    assert own.exchange.flush()
    own.log(3)
    assert own.exchange.flush()
    assert own.steps == [0, 1, 2, 3]
    assert own.run.rows[1] == {"loss": 1.0, "accuracy": 0.0, "global_step": 1}
    assert own.threads == ({"here", OWN_THREAD} if at_once else {OWN_THREAD})


@pytest.mark.parametrize("is_stopped", [False, True], ids=["device", "wandb"])
def test_close_keeps_its_limit_and_reports_lost_rows(
    make: Callable[..., Own], limit: Limit, caplog: pytest.LogCaptureFixture, is_stopped: bool
) -> None:
    limit(interface, LAST_WRITES=0.1)
    own = make(at_once=not is_stopped)
    if is_stopped:
        own.run.goes_on.clear()
    own.log(0, accuracy=0.5 if is_stopped else Stall().number(asked=True))
    own.log(1)
    assert not own.exchange.close(0.05)
    assert "2 rows of rank 0 are lost" in caplog.text


@pytest.mark.parametrize("end", ["close", "failed", "leave", "detach", "join_timeout", "max_pending_rows"])
def test_waiting_for_other_writers_is_bounded(make: Callable[..., Own], end: str) -> None:
    limits = {"join_timeout": 0.05} if end == "join_timeout" else {"join_timeout": 60.0}
    limits |= {"max_pending_rows": 2} if end == "max_pending_rows" else {}
    own = make(at_once=False, has_all_writers=lambda: False, limits=Limits(finish_timeout=0.05, **limits))  # type: ignore[arg-type]
    own.log(0)
    own.log(1)
    if not end.endswith(("timeout", "rows")):
        own.end(end)
    eventually(lambda: own.steps == [0, 1])


# --- wandb's own process stalls ---------------------------------------------------------------------------------------


def test_pending_rows_are_bounded_and_lost_rows_are_reported(
    make: Callable[..., Own], limit: Limit, caplog: pytest.LogCaptureFixture
) -> None:
    limit(direct, _STANDSTILL=0.05)
    own = make(at_once=False, limits=Limits(max_pending_rows=10, finish_timeout=30))
    own.run.goes_on.clear()
    for step in range(15):
        own.log(step)
    own.run.goes_on.set()
    assert not own.exchange.flush(), "so that the job can fail"
    assert not own.exchange.close()
    assert own.exchange.lifecycle.unwritten == 5, "so that the run ends as failed"
    assert own.steps == list(range(10))
    assert caplog.text.count("more than 10 rows of rank 0 wait") == 1
    assert "5 rows of rank 0 are lost" in caplog.text


def test_an_error_in_one_row_affects_only_that_row(make: Callable[..., Own], caplog: pytest.LogCaptureFixture) -> None:
    own = make(at_once=False)
    own.log(0)
    for step in range(1, 5):
        own.log(step, bad=True)
    own.log(5)
    assert own.exchange.flush()
    assert own.steps == [0, 5]
    assert caplog.text.count("a row of rank 0 could not be written") == 1
    assert not own.exchange.close()
    assert "rank 0 has lost values: 8 that W&B refused." in caplog.text


# --- signal handlers --------------------------------------------------------------------------------------------------


def test_a_signal_handler_does_not_tear_the_row_in_progress(make: Callable[..., Own], limit: Limit) -> None:
    """Its row is written by the thread, which waits until the interrupted thread has written its own."""
    limit(writer, _LONGEST_TURN=20.0)
    own = make(at_once=True)
    logged: list[tuple[dict[str, Any], bool | None]] = []
    during = [lambda: signal.raise_signal(signal.SIGUSR1)]

    def log(row: dict[str, Any], commit: bool | None = None) -> None:
        while during:
            during.pop()()
        logged.append((row, commit))

    own.run.log = log

    def handler(*_: object) -> None:
        own.log(7, commit=True)
        own.exchange.flush(0.2)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        own.log(0, commit=False, table=object())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert own.exchange.flush()
    assert [(row.get("global_step"), commit) for row, commit in logged] == [(0, False), (None, None), (7, None)]


def test_a_row_waits_only_for_its_own_device_values() -> None:
    stall = Stall()
    assert not Contribution({"loss": stall.number()}, 0).has_arrived()
    assert Contribution({"loss": 1.0}, 0, None, stall.number()).has_arrived()


# --- until it is certain which rank writes the run --------------------------------------------------------------------


def test_a_run_that_the_next_rank_cannot_open_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    def move(*_: Any) -> None:
        raise ValueError("no")

    unit, store = unit_of(TWO[1], "global"), JobStore(HashStore(), "test", TWO[1], 30.0)
    GenerationStore(store.below(keys_of(unit)), 1).claim(Generation(0, (), source=1))
    exchange = WatchingExchange(unit, Hooks(lambda: store, move=move), Limits())
    exchange.start()
    exchange.put(Contribution({"loss": 1.0}, 1, True))
    assert not exchange.close(timeout=10)
    assert not exchange.flush()
    assert "rank 1 cannot open the run, which no rank writes" in caplog.text


def test_rows_are_reported_if_it_is_never_certain_which_rank_writes_the_run(caplog: pytest.LogCaptureFixture) -> None:
    exchange = WatchingExchange(unit_of(TWO[1], "global"), Hooks(), Limits())
    exchange.put(Contribution({"loss": 1.0}, 1, True))
    exchange.start()
    assert not exchange.close(timeout=10)
    assert "what rank 1 logged may be lost: it ended before it was certain which rank writes the run" in caplog.text
