"""How sections of several ranks appear in rows. Ranks are threads, each with a simulated clock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes import TWO, FakeWandb, Job, on_ranks, ranks

from dist_wandb.session.sections import Sections
from dist_wandb.session.session import Session

FOUR = ranks(4)
MS = 1_000_000  # nanoseconds
STEP = 200  # milliseconds that all ranks take for a step, because they wait for each other


class Clock:
    """One rank's clock."""

    def __init__(self, session: Session) -> None:
        self.now = 0
        self.session = session
        session._intake.sections = Sections(lambda: self.now, lambda: None)

    def spend(self, name: str, milliseconds: int, *, waits: bool = False) -> None:
        with self.session.timed(name, waits=waits):
            self.now += milliseconds * MS

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
        Clock(session).step(7, 40 + 20 * rank, weight=1 + rank)
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
        clock, samples = Clock(session), 1 + 2 * rank
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
    clocks = [Clock(session) for session in sessions]
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
        Clock(session).step(0, 40 + 20 * rank)
    rows_of(sessions, fake_wandb)
    forward = sorted(row["time/forward"] for run in fake_wandb.runs for row in run.rows)
    assert forward == pytest.approx([0.04, 0.06])
    assert not any("/max" in name for run in fake_wandb.runs for row in run.rows for name in row)


def test_a_rank_without_sections_is_left_out_of_the_timings(job: Job, fake_wandb: FakeWandb) -> None:
    first, second = sessions = job(TWO, limits={"heartbeat": 0.05})
    clock = Clock(first)
    for number in range(3):
        clock.step(number, 40)
        second.log({"loss": 1.0}, number)
    rows = rows_of(sessions, fake_wandb)
    times = {row["global_step"]: row["time/forward"] for row in rows if "time/forward" in row}
    assert times == pytest.approx({0: 0.04, 1: 0.04, 2: 0.04})
    assert not any("dist_wandb/degraded" in row for row in rows)
