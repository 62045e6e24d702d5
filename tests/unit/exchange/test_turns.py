"""The times of a rank's turns, by what it logged and what it waits for; the rounds are reduced by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dist_wandb.exchange.lifecycle import Lifecycle
from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.exchange.protocol.pacing import Pacer
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.turns import Turns
from dist_wandb.settings.limits import Limits


class Empty:
    """An inbox that stays empty.

    Attributes:
        waited: The timeouts with which it was drained, in seconds.
    """

    is_empty = True
    unread = computing = 0

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.flushes: list[object] = []

    def drain(self, timeout: float) -> bool:
        self.waited.append(timeout)
        return False


def waiting(rounds: Rounds, flushes: int = 0) -> list[float]:
    """Return how long a rank waits before each of four consecutive rounds, in seconds."""
    limits, inbox = Limits(heartbeat=3.0), Empty()
    inbox.flushes = [object()] * flushes
    context: Any = SimpleNamespace(lifecycle=Lifecycle(), limits=limits)
    unused: Any = None
    empty: Any = inbox
    turns = Turns(context, rounds, empty, Pacer(limits, 0.0), unused)
    for _ in range(4):
        turns.wait(has_more=False, awaits_primary=lambda: False)
    return inbox.waited


def exchange(ranks: list[Rounds]) -> None:
    packed = [rank.pack() for rank in ranks]
    sums = [sum(column) for column in zip(*(lists[0] for lists in packed), strict=True)]
    maxima = [max(column) for column in zip(*(lists[1] for lists in packed), strict=True)]
    for rank in ranks:
        rank.unpack(sums, maxima)


@pytest.fixture
def ranks() -> list[Rounds]:
    """Two ranks that log a loss; the first has logged it at a step at which the second has not."""
    both = [Rounds(rank, 2) for rank in range(2)]
    for step in range(2):
        for rank in both[: 2 - step]:
            rank.learn([["loss"]])
            rank.post({"loss": Totals.of(1.0)}, step)
        exchange(both)
    return both


def test_a_rank_that_waits_for_others_checks_at_short_growing_intervals(ranks: list[Rounds]) -> None:
    assert waiting(ranks[0]) == [0.01, 0.02, 0.04, 0.08]


def test_a_rank_that_others_wait_for_takes_part_once_per_heartbeat(ranks: list[Rounds]) -> None:
    assert waiting(ranks[1]) == [3.0] * 4


def test_a_flush_shortens_the_intervals_even_if_others_wait_for_this_rank(ranks: list[Rounds]) -> None:
    assert waiting(ranks[1], flushes=1) == [0.01, 0.02, 0.04, 0.08]


def test_idle_ranks_take_part_once_per_heartbeat(ranks: list[Rounds]) -> None:
    ranks[1].post({"loss": Totals.of(1.0)}, 1)
    exchange(ranks)
    assert [waiting(rank) for rank in ranks] == [[3.0] * 4] * 2
