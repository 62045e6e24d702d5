"""What a rank reports, each event once, and what it does with work that remains when a generation ends."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from limits import Limit

from dist_wandb.exchange import participation
from dist_wandb.exchange.interface import Lifecycle
from dist_wandb.exchange.membership.generations import Generation
from dist_wandb.exchange.participation import Participation
from dist_wandb.exchange.protocol.calls import Key
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.protocol.rounds import Rounds, encoded
from dist_wandb.exchange.reports import Context, report_lost
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.exchange.turns import Pacer
from dist_wandb.job.topology import Topology
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.options import Limits
from dist_wandb.settings.plan import plan_run, unit_of


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reports(clock: Clock) -> Context:
    """The context of rank 1 of two."""
    second = Topology(1, 1, 0, 2, 2, 1)
    writer = RunWriter(NullRun(), plan_run(second, "auto", "global", "exp"), "global_step")
    rows = Rows(writer, {"*": "mean"}, spread=["loss"], rank=1, index=1)
    return Context(unit_of(second, "global"), Limits(peer_timeout=10.0, heartbeat=1.0), rows, Lifecycle(), clock)


ROW = Row(("loss",), (0,), 0, 0, lanes_of([number_of(1.0)]), {}, (1,))


@pytest.fixture
def rounds() -> Rounds:
    return Rounds(1, 2)


@pytest.fixture
def second(reports: Context, rounds: Rounds) -> Participation:
    """Rank 1, which is in the first generation, with stand-ins for the others."""
    participation = Participation(reports, rounds, Pacer(reports.limits, 0.0))
    presence: Any = SimpleNamespace(
        places={}, gone={}, are_gone=lambda _: False, absent=lambda _: set(), ended=lambda *_: set()
    )
    participation.membership = cast("Any", SimpleNamespace(presence=presence))
    participation.enter(Generation(0, (0, 1)))
    return participation


def cells(*names: str, step: int = 0) -> list[Key]:
    return [Key(name, step, 0) for name in names]


LATE = "late with %s."


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.message for record in caplog.records]
    caplog.clear()
    return messages


def test_reports_list_a_few_names_and_positions(reports: Context, caplog: pytest.LogCaptureFixture) -> None:
    reports.values("one", cells("loss", step=3), LATE)
    reports.values("some", [*cells("a", "b", step=3), *cells("a", step=4), *cells("a", step=5)], LATE)
    reports.values("many", cells(*"abcde"), LATE)
    reports.values("without a step", [Key("loss", None, 6)], LATE)
    reports.values("metric", cells("accuracy\0metric\0[1, 2]"), LATE)
    reports.values("nothing", [], LATE)
    assert logged(caplog) == [
        "dist_wandb: late with 'loss' at step 3.",
        "dist_wandb: late with 'a', 'b' at step 3 and in 2 more rows.",
        "dist_wandb: late with 5 names ('a', 'b', 'c', …) at step 0.",
        "dist_wandb: late with 'loss' at its call 7 without a step.",
        "dist_wandb: late with 'accuracy' at step 0.",
    ]


def test_a_continuing_problem_is_reported_once_with_a_later_count(
    reports: Context, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(5):
        reports.values("late", cells("a", "b", step=step), LATE)
        clock.now += 9
    assert logged(caplog) == ["dist_wandb: late with 'a', 'b' at step 0."]
    clock.now += 20
    reports.values("late", cells("a", step=7), LATE)
    assert logged(caplog) == [
        "dist_wandb: late with 'a' at step 7. Since the last message of this kind there were 8 more."
    ]


def test_recurring_problems_are_reported_less_and_less_often(
    reports: Context, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(1000):
        reports.values("late", cells("a"), LATE)
        clock.now += 30
    assert len(logged(caplog)) == 3  # after 0, 10 and 20 quiet seconds; 40 never pass


def test_consequences_of_a_reported_problem_are_not_reported(
    reports: Context, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    assert not reports.follows("late", "silent")
    reports.values("silent", cells("a"), LATE)
    assert reports.follows("late", "silent")
    clock.now += 100
    assert not reports.follows("late", "silent")
    reports.expect("other")
    reports.values("other", cells("a"), LATE)
    assert len(logged(caplog)) == 1


def test_lost_values_are_reported_in_one_line_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    report_lost(3, Counter({"that came too late": 0}))
    assert logged(caplog) == []
    report_lost(3, Counter({"that came too late": 12, "that W&B refused": 1, "that could not be processed": 0}))
    assert logged(caplog) == ["dist_wandb: rank 3 has lost values: 12 that came too late, 1 that W&B refused."]


def test_rows_that_cannot_be_kept_for_the_rank_that_writes_are_reported_and_counted(
    reports: Context, rounds: Rounds, caplog: pytest.LogCaptureFixture, limit: Limit
) -> None:
    limit(participation, _MOST_KEPT=20)
    now = time.monotonic()
    rank = Participation(reports, rounds, Pacer(reports.limits, now))
    rank.kept.extend([ROW] * 20)
    rank.continue_alone()
    reports.rows.post(Contribution({"loss": 1.0}, 7, x=7), rounds, now)
    for _ in range(3):
        rank.round()
    what = "more than 20 rows wait on rank 1 for the rank that writes them, which is away: the oldest are lost"
    assert logged(caplog) == [f"dist_wandb: {what}, and counted at the end."]
    assert reports.rows.writer.lost == {"that could not be kept for the rank that writes them": 1}
    assert rank.keeps_rows


# --- work that remains when a generation ends -------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_all_members_do_the_work_that_remained_on_one_of_them(second: Participation, is_first: bool) -> None:
    """Else the spread of that row, or its tables, would be exchanged by some members only, which then do not agree."""
    reduced = list[Sequence[float]]()

    def tally(mine: bytes) -> dict[bytes, tuple[int, ...]]:
        other = json.dumps({**json.loads(mine), "due": [encoded(ROW)]}).encode()
        found: list[tuple[bytes, tuple[int, ...]]] = [(other, (0,)), (mine, (1,))]
        return dict(found if is_first else reversed(found))

    def reduce(sums: Sequence[float], maxima: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        reduced.append(sums)
        return sums, maxima

    group: Any = SimpleNamespace(tally=tally, reduce=reduce)
    second.begin(group, Generation(0, (0, 1)))
    assert len(reduced) == 1


def test_what_a_rank_gave_to_a_round_that_the_others_broke_off_without_it_is_given_again(
    reports: Context, rounds: Rounds, second: Participation
) -> None:
    """It has the result of the round, but stalled then; the next generation has begun before that round."""
    state = {**Rounds(0, 2).snapshot(), "unwritten": encoded([]), "ranks": []}
    rounds.table.names["loss"] = 0
    reports.rows.post(Contribution({"loss": 1.0}, 7, x=7), rounds, 0.0)
    second.continue_alone()  # a round of which it has the result
    second.round()
    assert not rounds.outbox.waiting
    membership: Any = second.membership
    membership.generations = SimpleNamespace(latest=lambda found: found, state=lambda _: state)
    membership.join = lambda *_: Generation(2, (0, 1), joined=(1,))
    second.enter(Generation(1, (0,), last_round=rounds.table.round - 1))
    assert [call.step for call in rounds.outbox.waiting] == [7]
