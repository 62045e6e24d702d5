"""Timed sections of the script and parts of its steps, and how they appear in rows; clocks and events are simulated."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import TWO, FakeWandb, Job, on_ranks, ranks
from limits import Limit
from torch import nn

from dist_wandb import ConfigurationError
from dist_wandb.session import sections as module
from dist_wandb.session.sections import ForwardHook, Sections, StepTimings
from dist_wandb.session.session import Session

MS = 1_000_000  # nanoseconds


@dataclass
class Clock:
    """A simulated host clock, and a device that lags behind it."""

    now: int = 0
    passed: float = 0.0  # milliseconds of the device's time that have passed
    device: float | None = None  # device time of the next event; `None` for no device

    def __call__(self) -> int:
        return self.now

    def event(self) -> Event | None:
        return None if self.device is None else Event(self, self.device)

    def pass_(self, milliseconds: float) -> None:
        self.now += int(milliseconds * MS)


@dataclass(frozen=True)
class Event:
    clock: Clock
    at: float

    def query(self) -> bool:
        return self.clock.passed >= self.at

    def elapsed_time(self, end: Event) -> float:
        assert self.query(), "asked before the device has passed it"
        assert end.query(), "asked before the device has passed it"
        return end.at - self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sections(clock: Clock) -> Sections:
    return Sections(clock, clock.event)


def spend(sections: Sections, clock: Clock, name: str, milliseconds: float, *, waits: bool = False) -> None:
    with sections.timed(name, 0, waits=waits):
        clock.pass_(milliseconds)


@pytest.mark.parametrize(
    ("outer_waits", "inner_waits", "busy"),
    [(False, False, 1.0), (False, True, 0.6), (True, False, 0.4), (True, True, 0)],
)
def test_busy_is_the_share_of_time_without_waiting(
    sections: Sections, clock: Clock, *, outer_waits: bool, inner_waits: bool, busy: float
) -> None:
    with sections.timed("outer", 0, waits=outer_waits):
        clock.pass_(60)
        spend(sections, clock, "inner", 40, waits=inner_waits)
    taken = sections.due_timings(["loss"], 1)
    assert (taken["time/outer"], taken["time/inner"]) == (0.1, 0.04)
    assert taken["time/busy"] == pytest.approx(busy)


def test_a_section_that_raises_is_counted(sections: Sections, clock: Clock) -> None:
    def fail() -> None:
        with sections.timed("data", 0, waits=False):
            clock.pass_(5)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    spend(sections, clock, "data", 5)
    assert sections.due_timings(["loss"], 1)["time/data"] == 0.01


def test_each_call_of_a_decorated_function_is_a_section(sections: Sections, clock: Clock) -> None:
    @sections.timed("forward", 0, waits=False)
    def forward(depth: int) -> int:
        """What it does."""
        clock.pass_(10)
        return depth and forward(depth - 1)

    assert (forward(1), forward.__doc__) == (0, "What it does.")
    assert sections.due_timings(["loss"], 1) == {"time/forward": 0.02, "time/step": 0.02, "time/busy": 1.0}


def test_coroutines_and_generators_cannot_be_decorated(sections: Sections) -> None:
    async def coroutine() -> None: ...

    def generator() -> object:
        yield

    for function in (coroutine, generator):
        with pytest.raises(ConfigurationError, match=f"{function.__name__}.*Put `with run.timed"):
            sections.timed("x", 0, waits=False)(function)


@pytest.mark.parametrize("name", ["step", "busy", "straggler_rank", "a\0b", 3])
def test_invalid_names_are_refused(sections: Sections, name: str) -> None:
    with pytest.raises(ConfigurationError, match="rank 7"):
        sections.timed(name, 7, waits=False)


def test_sections_may_end_out_of_order(sections: Sections, clock: Clock) -> None:
    first, second = sections.timed("first", 0, waits=False), sections.timed("second", 0, waits=True)
    first.__enter__()
    clock.pass_(10)
    second.__enter__()
    clock.pass_(10)
    first.__exit__()
    clock.pass_(10)
    second.__exit__()
    spend(sections, clock, "third", 10)
    taken = sections.due_timings(["loss"], 1)
    assert [taken[f"time/{name}"] for name in ("first", "second", "third")] == [0.02, 0.02, 0.01]
    assert taken["time/busy"] == 0.75, "the waiting section is inside no other when it ends"
    is_untouched(sections, clock)


def test_a_section_is_reentrant_and_usable_in_several_threads(sections: Sections, clock: Clock) -> None:
    section = sections.timed("data", 0, waits=False)
    with section:
        clock.pass_(10)
        with section:
            clock.pass_(10)

        def enter_again() -> None:
            with section:
                clock.pass_(10)

        thread = threading.Thread(target=enter_again)
        thread.start()
        thread.join()
    taken = sections.due_timings(["loss"], 1)
    assert taken["time/data"] == 0.04, "30 ms in one section, 10 ms in the other"
    is_untouched(sections, clock)


def is_untouched(sections: Sections, clock: Clock) -> None:
    """Later sections are measured as usual."""
    spend(sections, clock, "data", 30)
    clock.pass_(10)
    assert sections.due_timings(["loss"], 99)["time/busy"] == 0.75


@pytest.mark.parametrize("steps", [range(6), [None] * 6])
def test_extra_rows_of_one_rank_take_no_timings(sections: Sections, clock: Clock, steps: list[int | None]) -> None:
    found = []
    for number, step in enumerate(steps):
        spend(sections, clock, "data", 10)
        found.append(sections.due_timings(["loss"], step))
        if number % 2:
            spend(sections, clock, "data", 1)
            assert sections.due_timings(["lr"], step) == {}
    assert [round(taken["time/data"], 3) for taken in found] == [0.01, 0.01, 0.011, 0.01, 0.011, 0.01]


def test_a_name_logged_once_does_not_hold_back_timings(sections: Sections, clock: Clock) -> None:
    found = []
    for step, name in enumerate(["parameters", *["loss"] * 6]):
        spend(sections, clock, "data", 10)
        found.append(sections.due_timings([name], step).get("time/data"))
    assert found == [0.01, None, None, None, 0.04, 0.01, 0.01]


def test_a_device_is_polled_without_waiting(sections: Sections, clock: Clock) -> None:
    clock.device = 0.0
    forward = sections.timed("forward", 0, waits=False)
    forward.__enter__()
    clock.pass_(2)
    clock.device = 50.0  # work that the host launches in 2 ms takes the device 50 ms
    forward.__exit__()
    clock.pass_(8)
    assert sections.due_timings(["loss"], 1) == {}, "the device has not passed the events yet"
    clock.passed = 50.0
    clock.pass_(90)
    assert sections.due_timings(["loss"], 2)["time/forward"] == 0.05


def test_pending_device_times_are_bounded_without_loss(sections: Sections, clock: Clock, limit: Limit) -> None:
    limit(module, _MOST_WAITING=3)
    clock.device = 1.0
    for _ in range(5):
        spend(sections, clock, "forward", 10)
    assert sections.due_timings(["loss"], 1)["time/forward"] == 0.02, "by the host's clock"
    clock.passed = 1.0
    clock.pass_(10)
    assert sections.due_timings(["loss"], 2)["time/forward"] == 0.03, "that of the host is longer"


@pytest.fixture
def measured(sections: Sections, clock: Clock) -> Any:
    """A stand-in for a session whose steps are measured: `steps` spends seconds in parts, and returns the timings."""

    def steps(timings: StepTimings, *parts: tuple[Any, int]) -> dict[str, float]:
        for part, seconds in parts:
            timings.enter(part)
            clock.pass_(1000 * seconds)
        timings.enter(None)
        return sections.due_timings({"loss"}, None)

    return SimpleNamespace(timed=lambda name, waits: sections.timed(name, 0, waits=waits), steps=steps)


@pytest.mark.parametrize(("is_sharded", "busy"), [(False, 0.4), (True, 0.25)])
def test_each_part_is_timed_and_waiting_parts_do_not_count_as_busy(
    measured: Any, *, is_sharded: bool, busy: float
) -> None:
    """With sharded parameters, all but loading the data wait."""
    parts = [("data", 1), ("forward", 2), ("backward", 4), (None, 8), ("optimizer", 1), ("data", 4)]
    assert measured.steps(StepTimings(lambda: measured, is_sharded=is_sharded), *parts) == {
        "time/data": 5.0,
        "time/forward": 2.0,
        "time/backward": 4.0,
        "time/optimizer": 1.0,
        "time/step": 20.0,
        "time/busy": busy,
    }


def test_timing_starts_when_a_session_is_opened(measured: Any) -> None:
    open_sessions: list[Any] = []
    timings = StepTimings(lambda: open_sessions[0] if open_sessions else None)
    assert measured.steps(timings, ("data", 1)) == {}
    assert timings.part is None
    open_sessions.append(measured)
    timings.enter("data")
    assert timings.part == "data"
    assert measured.steps(timings, ("forward", 1))["time/forward"] == 1.0


def test_another_thread_cannot_change_the_part_before_the_training_ends(measured: Any) -> None:
    timings = StepTimings(lambda: measured)
    timings.enter("forward")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(timings.enter, "data").result(30)
        assert timings.part == "forward"
        timings.end()
        assert timings.part is None
        pool.submit(timings.enter, "data").result(30)
        assert timings.part == "data"


def test_the_hook_has_no_effect_in_copied_or_pickled_modules() -> None:
    called: list[Any] = []
    module = nn.Identity()
    module.register_forward_pre_hook(ForwardHook(called.append))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        other(1)
    assert called == []
    module(1)
    assert called == [module]


# --- in rows of several ranks -----------------------------------------------------------------------------------------


FOUR = ranks(4)
STEP = 200  # milliseconds that all ranks take for a step, because they wait for each other


class RankClock(Clock):
    """One rank's clock."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        session._intake.sections = Sections(self, self.event)

    def spend(self, name: str, milliseconds: int, *, waits: bool = False) -> None:
        with self.session.timed(name, waits=waits):
            self.pass_(milliseconds)

    def step(self, number: int, forward: int, **log: Any) -> None:
        """Load data, compute, wait for the others, log."""
        self.spend("data", 20)
        self.spend("forward", forward)
        self.spend("backward", STEP - 20 - forward, waits=True)
        self.session.log({"loss": 1.0}, number, **log)


def rows_of(sessions: list[Session], fake_wandb: FakeWandb) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(sessions)) as pool:
        assert all(pool.map(lambda session: session.flush(), sessions))
    return fake_wandb.runs[0].rows


def test_timings_in_a_row_have_the_mean_and_the_spread(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(FOUR, reduce="sum")
    for rank, session in enumerate(sessions):
        RankClock(session).step(7, 40 + 20 * rank, weight=1 + rank)
    (row,) = rows_of(sessions, fake_wandb)
    assert (row["loss"], row["global_step"]) == (4.0, 7)
    assert row["time/data"] == pytest.approx(0.02)
    forward = {kind: row[f"time/forward{kind}"] for kind in ("", "/min", "/max", "/argmax_rank")}
    assert forward == pytest.approx({"": 0.07, "/min": 0.04, "/max": 0.1, "/argmax_rank": 3})
    assert row["time/backward/max"] == pytest.approx(0.14)
    assert row["time/step"] == pytest.approx(0.2)
    busy = {kind: row[f"time/busy{kind}"] for kind in ("", "/min", "/max", "/argmax_rank")}
    assert busy == pytest.approx({"": 0.45, "/min": 0.3, "/max": 0.6, "/argmax_rank": 3})
    assert "time/straggler_rank" not in row, "one row is not enough"


def test_a_weight_beside_timings_is_that_of_all_other_values(
    job: Job, fake_wandb: FakeWandb, recwarn: pytest.WarningsRecorder
) -> None:
    """Also of those that are nested; the row may have others than numbers."""
    sessions = job(TWO)
    for rank, session in enumerate(sessions):
        clock, samples = RankClock(session), 1 + 2 * rank
        for weight in (samples, {"val.acc": samples, "note": 1}):
            clock.spend("data", 20)
            session.log({"val": {"acc": 1.0 + rank}, "note": "text"}, clock.now, weight=weight)
    rows = rows_of(sessions, fake_wandb)
    assert [(row["val"]["acc"], row["note"], row["time/data"]) for row in rows] == [(1.75, "text", 0.02)] * 2
    on_ranks(2, lambda rank: sessions[rank].finish())
    assert not [warning for warning in recwarn if "patterns" in str(warning.message)]


@pytest.mark.parametrize("slow", [2, None])
def test_a_straggler_is_named(job: Job, fake_wandb: FakeWandb, slow: int | None) -> None:
    sessions = job(FOUR)
    clocks = [RankClock(session) for session in sessions]
    for number in range(25):
        for rank, clock in enumerate(clocks):
            noise = (number * (rank + 3)) % 4  # milliseconds: another rank is the slowest in each row
            clock.step(number, (130 if rank == slow else 100) + noise)
            if rank == 0 and number % 3 == 0:
                clock.session.log({"lr": 0.1}, number)
    rows = [row for row in rows_of(sessions, fake_wandb) if "loss" in row]
    named = [(row.get("time/straggler_rank"), "time/straggler_excess" in row) for row in rows]
    assert named == [(None, False)] * 17 + [(slow, slow is not None)] * 8
    if slow is not None:
        assert rows[-1]["time/straggler_excess"] == pytest.approx(0.03, abs=0.005)


def test_rows_of_separate_runs_have_the_ranks_own_times(job: Job, fake_wandb: FakeWandb) -> None:
    sessions = job(TWO, run_mode="new", reduce=None)
    for rank, session in enumerate(sessions):
        RankClock(session).step(0, 40 + 20 * rank)
    rows_of(sessions, fake_wandb)
    forward = sorted(row["time/forward"] for run in fake_wandb.runs for row in run.rows)
    assert forward == pytest.approx([0.04, 0.06])
    assert not any("/max" in name for run in fake_wandb.runs for row in run.rows for name in row)


def test_a_rank_without_sections_is_left_out_of_the_timings(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = sessions = job(TWO, limits={"heartbeat": 0.05})
    clock = RankClock(first)
    for number in range(3):
        clock.step(number, 40)
        second.log({"loss": 1.0}, number)
    rows = rows_of(sessions, fake_wandb)
    times = {row["global_step"]: row["time/forward"] for row in rows if "time/forward" in row}
    assert times == pytest.approx({0: 0.04, 1: 0.04, 2: 0.04})
    assert not any("dist_wandb/degraded" in row for row in rows)
