"""The times of a rank's turns, by what it logged and what it waits for; and what waits in its inbox."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from units import Stall

from dist_wandb.exchange import turns as turns_module
from dist_wandb.exchange.interface import Flush, Lifecycle
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.rounds import Outcome, Rounds
from dist_wandb.exchange.rows import Contribution
from dist_wandb.exchange.turns import Inbox, Pacer, Turns
from dist_wandb.settings.options import Limits

LIMITS = Limits(heartbeat=3.0, max_pending_rows=300)


class Empty:
    """An inbox to which nothing comes.

    Attributes:
        waited: How long the thread waited for contributions, in seconds: for any, or for more.
    """

    is_empty = True
    backlog = computing = 0

    def __init__(self, clock: list[float]) -> None:
        self.waited: list[float] = []
        self.flushes: list[object] = []
        self._clock = clock

    def drain(self, timeout: float = 0.0) -> bool:
        self.linger(timeout)
        return False

    def linger(self, seconds: float, **_: Any) -> None:
        if seconds:
            self.waited.append(round(seconds, 3))
            self._clock[0] += seconds

    def answer(self, flushes: list[object]) -> None:
        self.flushes = [flush for flush in self.flushes if flush not in flushes]


class Rank:
    """A rank whose thread waits for its turns, on a clock that only waiting moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = [100.0]
        monkeypatch.setattr(turns_module, "time", SimpleNamespace(monotonic=lambda: self.clock[0], sleep=self.sleep))
        self.inbox = Empty(self.clock)
        self.rounds = Rounds(0, 2)
        self.lifecycle = Lifecycle()
        writing = SimpleNamespace(end_row=lambda: None, due=0)
        posting = SimpleNamespace(end_row=lambda _: None)
        rows = SimpleNamespace(writing=writing, posting=posting)
        context: Any = SimpleNamespace(lifecycle=self.lifecycle, limits=LIMITS, rows=rows)
        inbox: Any = self.inbox
        self.turns = Turns(context, self.rounds, inbox, Pacer(LIMITS, 100.0))

    def sleep(self, seconds: float) -> None:
        self.clock[0] += seconds

    def log(self) -> None:
        self.rounds.outbox.post(["loss"], lanes_of([number_of(1.0)]), None, -1, self.clock[0])

    def put(self) -> float:
        """Log, as a user's thread does; return for how many seconds it waits."""
        began = self.clock[0]
        self.log()
        self.turns.await_room()
        return round(self.clock[0] - began, 1)

    def wait(self, outcome: Outcome, *, has_more: bool = False) -> list[float]:
        """Return how long the rank waits before a round, in seconds; the round has an outcome."""
        self.inbox.waited.clear()
        self.turns.wait(has_more=has_more, awaits_primary=lambda: False)
        if outcome.taken:
            self.rounds.outbox.take(outcome.taken)
        self.turns.end_round(outcome)
        return list(self.inbox.waited)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_an_idle_rank_takes_part_once_per_heartbeat_also_if_others_wait(rank: Rank) -> None:
    assert [rank.wait(Outcome(awaits=awaits)) for awaits in (False, True, False)] == [[3.0], [3.0], [3.0]]


def test_a_rank_whose_rows_wait_for_others_takes_part_soon(rank: Rank) -> None:
    rank.log()
    late, later = Rounds(1, 2), rank.clock[0] + 10.0
    for _ in range(2):  # the name, and the call
        offers = {rank.rounds.offer(later): frozenset([0]), late.offer(later): frozenset([1])}
        plan = rank.rounds.plan(offers)
        lists = plan.pack()
        rank.turns.end_round(rank.rounds.unpack(plan, *lists))
        late.unpack(late.plan(offers), *lists)
    assert not rank.rounds.outbox.waiting, "the call is in the table"
    assert rank.wait(Outcome(awaits=True)) == [0.25]


def test_calls_wait_for_more_calls_and_as_long_again_for_other_ranks(rank: Rank) -> None:
    rank.log()
    assert rank.wait(Outcome()) == [0.25]
    assert rank.wait(Outcome()) == [0.25]
    assert rank.wait(Outcome(taken=1)) == [0.25]
    assert rank.wait(Outcome()) == [3.0]


def test_many_calls_wait_for_no_more(rank: Rank) -> None:
    for _ in range(256):
        rank.log()
    assert rank.wait(Outcome()) == []


def test_rounds_of_a_flush_follow_each_other_after_pauses_that_double(rank: Rank) -> None:
    rank.log()
    rank.inbox.flushes = [object()]
    pauses = [pause for _ in range(11) for pause in rank.wait(Outcome())]
    assert pauses == [*(0.01 * 2**number for number in range(9)), 3.0]
    assert rank.rounds.intent is Intent.PAUSING


def test_nobody_waits_if_there_is_more_or_the_rank_closes(rank: Rank) -> None:
    assert rank.wait(Outcome(), has_more=True) == []
    rank.lifecycle.is_closing = True
    assert rank.wait(Outcome()) == []
    assert rank.rounds.intent is Intent.CLOSING


def test_a_rank_that_closes_waits_for_a_device_between_its_rounds(rank: Rank) -> None:
    rank.lifecycle.is_closing = True
    rank.inbox.computing = 1
    assert rank.wait(Outcome()) == [0.25]
    assert rank.wait(Outcome(), has_more=True) == []


def test_log_waits_shortly_for_an_exchange_that_stands_still(rank: Rank) -> None:
    waited = [rank.put() for _ in range(1200)]
    assert {number: seconds for number, seconds in enumerate(waited, 1) if seconds} == {557: 1.5, 1115: 1.5}
    rank.rounds.outbox.take(1000)
    assert [rank.put() for _ in range(357)][-2:] == [0.0, 1.5]


def test_log_waits_no_longer_once_the_rank_closes(rank: Rank) -> None:
    rank.lifecycle.is_closing = True
    assert not any(rank.put() for _ in range(600))


# --- the inbox --------------------------------------------------------------------------------------------------------


def test_contributions_stay_in_order_behind_one_that_is_still_on_a_device() -> None:
    posted: list[Contribution] = []
    inbox, stall = Inbox(posted.append), Stall()
    contributions = [
        Contribution({"loss": 1.0}, 0),
        Contribution({"loss": stall.number(asked=True)}, 1),
        Contribution({"loss": 2.0}, 2),
    ]
    for contribution in contributions:
        inbox.put(contribution)
    assert (inbox.backlog, len(inbox.computing), inbox.is_empty) == (3, 0, False)
    assert inbox.drain()
    assert posted == contributions[:1]
    assert (inbox.backlog, len(inbox.computing), inbox.is_empty) == (2, 2, False)
    assert not inbox.drain()
    stall.over.set()
    assert inbox.drain()
    assert posted == contributions
    assert inbox.is_empty
    assert not inbox.drain()


def test_flushes_are_answered_once_and_a_wake_takes_effect_at_once() -> None:
    inbox, flushes = Inbox(lambda _: None), [Flush(), Flush(together=True)]
    inbox.wake()
    assert inbox.drain(60.0), "waking the thread takes effect at once"
    for flush in flushes:
        inbox.wake(flush)
    inbox.drain()
    assert inbox.flushes == flushes
    inbox.answer(flushes[:1])
    assert [flush.is_set() for flush in flushes] == [True, False]
    assert inbox.flushes == flushes[1:]


def test_a_flush_ends_lingering() -> None:
    posted: list[Contribution] = []
    inbox = Inbox(posted.append)
    inbox.wake(Flush())
    began = time.monotonic()
    inbox.linger(60.0, is_open=lambda: True)
    inbox.linger(60.0, is_open=lambda: False)
    assert time.monotonic() - began < 30.0
    assert len(inbox.flushes) == 1


def test_many_contributions_end_lingering() -> None:
    posted: list[Contribution] = []
    inbox = Inbox(posted.append)
    for step in range(300):
        inbox.put(Contribution({"loss": 1.0}, step))

    def put_more() -> bool:
        for step in range(300, 600):
            inbox.put(Contribution({"loss": 1.0}, step))
        return True

    began = time.monotonic()
    inbox.linger(60.0, is_open=put_more)
    assert time.monotonic() - began < 30.0
    assert [contribution.step for contribution in posted] == list(range(600))
