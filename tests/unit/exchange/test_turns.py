"""The times of a rank's turns, by what it logged and what it waits for; what waits there; and patience with others."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from units import Stall

from dist_wandb.exchange import turns as turns_module
from dist_wandb.exchange.interface import Flush, Lifecycle
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.contributors import NEVER
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.reports import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.rows import Contribution
from dist_wandb.exchange.turns import Pacer, Turns
from dist_wandb.settings.options import Limits

LIMITS = Limits(heartbeat=3.0, max_pending_rows=300)


class Rank(Turns):
    """A rank to which nothing comes while its thread waits for its turns, on a clock that only waiting moves.

    Attributes:
        waited: How long the thread waited for contributions, in seconds: for any, or for more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = [100.0]
        monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: self.clock[0], sleep=self.sleep))
        self.waited: list[float] = []
        self.rounds = Rounds(0, 2)
        self.lifecycle = Lifecycle()
        super().__init__(context_of(self.lifecycle), self.rounds)

    def sleep(self, seconds: float) -> None:
        self.clock[0] += seconds

    def drain(self, timeout: float = 0.0) -> bool:
        self.linger(timeout)
        return False

    def linger(self, seconds: float) -> None:
        if seconds:
            self.waited.append(round(seconds, 3))
            self.sleep(seconds)

    def log(self) -> None:
        self.rounds.outbox.post(["loss"], lanes_of([number_of(1.0)]), None, -1, self.clock[0])

    def logs(self) -> float:
        """Log, as a user's thread does; return for how many seconds it waits."""
        began = self.clock[0]
        self.log()
        self.await_room()
        return round(self.clock[0] - began, 1)

    def waits(self, outcome: Outcome) -> list[float]:
        """Return how long the rank waits before a round, in seconds; the round has an outcome."""
        self.waited.clear()
        self.wait(awaits_primary=lambda: False)
        if outcome.taken:
            self.rounds.outbox.take(outcome.taken)
        self.end_round(outcome)
        return list(self.waited)


def context_of(lifecycle: Lifecycle, post: Callable[[Contribution], None] = lambda _: None) -> Any:
    writing = SimpleNamespace(end_row=lambda: None, due=0)
    posting = {"end_row": lambda _: None, "post": lambda contribution, *_: post(contribution)}
    return SimpleNamespace(lifecycle=lifecycle, limits=LIMITS, rows=SimpleNamespace(writing=writing, **posting))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_an_idle_rank_takes_part_once_per_heartbeat_also_if_others_wait(rank: Rank) -> None:
    assert [rank.waits(Outcome(awaits=awaits)) for awaits in (False, True, False)] == [[3.0], [3.0], [3.0]]


def test_a_rank_whose_rows_wait_for_others_takes_part_soon(rank: Rank) -> None:
    rank.log()
    late, later = Rounds(1, 2), rank.clock[0] + 10.0
    for _ in range(2):  # the name, and the call
        offers = {rank.rounds.offer(later): frozenset([0]), late.offer(later): frozenset([1])}
        plan = rank.rounds.plan(offers)
        lists = plan.pack()
        rank.end_round(rank.rounds.unpack(plan, *lists))
        late.unpack(late.plan(offers), *lists)
    assert not rank.rounds.outbox.waiting, "the call is in the table"
    assert rank.waits(Outcome(awaits=True)) == [0.25]


def test_calls_wait_for_more_calls_and_as_long_again_for_other_ranks(rank: Rank) -> None:
    rank.log()
    assert rank.waits(Outcome()) == [0.25]
    assert rank.waits(Outcome()) == [0.25]
    assert rank.waits(Outcome(taken=1)) == [0.25]
    assert rank.waits(Outcome()) == [3.0]


def test_many_calls_wait_for_no_more(rank: Rank) -> None:
    for _ in range(256):
        rank.log()
    assert rank.waits(Outcome()) == []


def test_rounds_of_a_flush_follow_each_other_after_pauses_that_double(rank: Rank) -> None:
    rank.log()
    rank.flushes = [Flush()]
    pauses = [pause for _ in range(11) for pause in rank.waits(Outcome())]
    assert pauses == [*(0.01 * 2**number for number in range(9)), 3.0]
    assert rank.rounds.intent is Intent.PAUSING


def test_a_rank_that_flushes_waits_two_heartbeats_for_the_others(rank: Rank) -> None:
    def is_answered(after: float) -> bool:
        rank.sleep(after)
        rank.end_round(Outcome(more=True))
        return not rank.flushes

    rank.flushes = [Flush()]
    assert [is_answered(after) for after in (0.0, 6.0, 0.1)] == [False, False, True]
    rank.end_round(Outcome())
    rank.flushes = [Flush()]
    assert not is_answered(0.0)
    rank.log()
    assert not is_answered(6.1)
    rank.rounds.outbox.take(1)
    assert not is_answered(6.1), "from the start, because calls were not finished"
    assert is_answered(6.1)


def test_nobody_waits_if_there_is_more_or_the_rank_closes(rank: Rank) -> None:
    rank.end_round(Outcome(more=True))
    assert rank.waits(Outcome()) == []
    rank.lifecycle.is_closing = True
    assert rank.waits(Outcome()) == []
    assert rank.rounds.intent is Intent.CLOSING


def test_a_rank_that_closes_waits_for_a_device_between_its_rounds(rank: Rank) -> None:
    rank.lifecycle.is_closing = True
    rank.computing.append(Contribution({}, None))
    assert rank.waits(Outcome(more=True)) == [0.25]
    assert rank.waits(Outcome()) == []


def test_log_waits_shortly_for_an_exchange_that_stands_still(rank: Rank) -> None:
    waited = [rank.logs() for _ in range(1200)]
    assert {number: seconds for number, seconds in enumerate(waited, 1) if seconds} == {557: 1.5, 1115: 1.5}
    rank.rounds.outbox.take(1000)
    assert [rank.logs() for _ in range(357)][-2:] == [0.0, 1.5]
    rank.lifecycle.is_closing = True
    assert not any(rank.logs() for _ in range(600))


# --- what was logged --------------------------------------------------------------------------------------------------


def test_contributions_stay_in_order_behind_one_that_is_still_on_a_device() -> None:
    posted: list[Contribution] = []
    turns, stall = Turns(context_of(Lifecycle(), posted.append), Rounds(0, 2)), Stall()
    contributions = [
        Contribution({"loss": 1.0}, 0),
        Contribution({"loss": stall.number(asked=True)}, 1),
        Contribution({"loss": 2.0}, 2),
    ]
    for contribution in contributions:
        turns.put(contribution)
    assert (turns.backlog, len(turns.computing), turns.is_empty) == (3, 0, False)
    assert turns.drain()
    assert posted == contributions[:1]
    assert (turns.backlog, len(turns.computing), turns.is_empty) == (2, 2, False)
    assert not turns.drain()
    stall.over.set()
    assert turns.drain()
    assert posted == contributions
    assert turns.is_empty
    assert not turns.drain()


def test_flushes_are_answered_once_and_a_wake_takes_effect_at_once() -> None:
    turns = Turns(context_of(Lifecycle()), Rounds(0, 2))
    flushes = [Flush(), Flush(together=True)]
    turns.wake()
    assert turns.drain(60.0), "waking the thread takes effect at once"
    for flush in flushes:
        turns.wake(flush)
    turns.drain()
    assert turns.flushes == flushes
    turns.answer(flushes[:1])
    assert [flush.is_set() for flush in flushes] == [True, False]
    assert turns.flushes == flushes[1:]


def test_nobody_lingers_if_a_caller_waits_or_the_rank_closes() -> None:
    lifecycle, began = Lifecycle(), time.monotonic()
    turns = Turns(context_of(lifecycle), Rounds(0, 2))
    turns.wake(Flush())
    turns.linger(60.0)
    turns.flushes.clear()
    lifecycle.is_closing = True
    turns.linger(60.0)
    assert time.monotonic() - began < 30.0


def test_many_contributions_end_lingering() -> None:
    posted: list[Contribution] = []

    def log(first: int) -> None:
        for step in range(first, first + 300):
            turns.put(Contribution({"loss": 1.0}, step))

    def post(contribution: Contribution) -> None:
        posted.append(contribution)
        if len(posted) == 300:
            log(300)

    turns, began = Turns(context_of(Lifecycle(), post), Rounds(0, 2)), time.monotonic()
    log(0)
    turns.linger(60.0)
    assert time.monotonic() - began < 30.0
    assert [contribution.step for contribution in posted] == list(range(600))


# --- patience with other ranks ----------------------------------------------------------------------------------------

NONE = NEVER, NEVER  # of new names, and of all, is overdue


@pytest.fixture
def pacer() -> Pacer:
    return Pacer(Limits(peer_timeout=60.0, heartbeat=1.0), 0.0)


def pass_time(pacer: Pacer, until: float, *, oldest: int | None) -> tuple[int, int]:
    """Return the overdue cells after rounds without a gap: one every half second, the first with number 1."""
    found = NONE
    for number in range(1, int(2 * until) + 2):
        found = pacer.begin_round((number - 1) / 2, number, oldest)
    return found


def test_new_names_are_overdue_after_a_few_heartbeats_and_all_after_peer_timeout(pacer: Pacer) -> None:
    assert pass_time(pacer, 4.5, oldest=1) == NONE
    assert pacer.begin_round(5.0, 11, 1) == (1, NEVER)
    for number in range(12, 121):
        overdue = pacer.begin_round((number - 1) / 2, number, 1)
    assert overdue == (110, NEVER)
    assert pacer.begin_round(60.0, 121, 1) == (111, 1)


def test_closed_cells_are_never_overdue_and_rounds_before_the_oldest_cell_are_forgotten(pacer: Pacer) -> None:
    pass_time(pacer, 30.0, oldest=1)
    assert pacer.begin_round(30.5, 62, None) == NONE
    assert pacer.begin_round(31.0, 63, 62) == NONE, "the time before they were opened does not count"
    pass_time(pacer, 61.0, oldest=63)
    pacer.begin_round(61.5, 124, 122)
    assert pacer.begin_round(62.0, 125, 122) == NONE


@pytest.mark.parametrize(("gap", "counted"), [(1.5, 1.5), (2.0, 2.0), (600.0, 2.0)])
def test_a_gap_between_rounds_counts_as_at_most_two_heartbeats(pacer: Pacer, gap: float, counted: float) -> None:
    pacer.begin_round(0.0, 1, 1)
    pacer.begin_round(gap, 2, 1)
    left = NEW_NAME_HEARTBEATS - counted
    assert pacer.begin_round(gap + left / 2, 3, 1) == NONE
    assert pacer.begin_round(gap + left - 0.01, 4, 1) == NONE
    assert pacer.begin_round(gap + left, 5, 1) == (1, NEVER)


def test_excluded_time_does_not_count_toward_patience(pacer: Pacer) -> None:
    pacer.begin_round(0.0, 1, 1)
    for seconds in (60.0, 40.0):
        pacer.exclude(seconds)
    assert not pacer.is_held_up(105.0)
    assert pacer.is_held_up(105.1)
    pacer.begin_round(101.9, 2, 1)
    pacer.begin_round(103.8, 3, 1)
    assert pacer.begin_round(104.9, 4, 1) == NONE
    assert pacer.begin_round(105.0, 5, 1) == (1, NEVER)
