"""Stragglers: a rank that delays the others is detected, and none if all ranks are equally fast."""

from __future__ import annotations

import random

import pytest

from dist_wandb.exchange.stragglers import EXCESS, RANK, Stragglers


def named(ranks: int, rows: int, seed: int, noise: float, slow: dict[int, float]) -> list[int | None]:
    """Return the detected rank of each row, for ranks with noisy times that wait for each other; one stalls in 4 %."""
    drawn, stragglers, found = random.Random(seed), Stragglers(), []
    for _ in range(rows):
        busy = [
            slow.get(rank, 1.0) * drawn.lognormvariate(0.0, noise) * (3.0 if drawn.random() < 0.04 / ranks else 1.0)
            for rank in range(ranks)
        ]
        step = max(busy) + 0.2  # time to reduce the gradients
        busiest = max(range(ranks), key=busy.__getitem__)
        shares = [seconds / step for seconds in busy]
        others = (sum(shares) - shares[busiest]) / (ranks - 1)
        stragglers.add(busiest, shares[busiest], others)
        found.append(stragglers.detect(step).get(RANK))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_a_rank_slower_by_30_percent_is_always_named(ranks: int, noise: float) -> None:
    for seed in range(20):
        found = named(ranks, 60, seed, noise, {1: 1.3})
        assert {one for one in found if one is not None} == {1}
        assert found[20:].count(1) >= 20


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_equal_ranks_are_rarely_named(ranks: int, noise: float) -> None:
    alarms = sum(any(one is not None for one in named(ranks, 60, seed, noise, {})) for seed in range(100))
    assert alarms <= 5


def test_the_excess_is_in_seconds_per_row() -> None:
    stragglers = Stragglers()
    for row in range(18):
        stragglers.add(3, 0.75, 0.5)
        assert stragglers.detect(2.0) == ({RANK: 3, EXCESS: 0.5} if row == 17 else {})
    stragglers.add(1, 0.75, 0.5)
    assert stragglers.detect(2.0) == {}


def test_no_straggler_is_named_without_a_row_duration() -> None:
    stragglers = Stragglers()
    assert stragglers.detect(1.0) == {}
    for _ in range(20):
        stragglers.add(0, 1.0, 0.0)
    assert stragglers.detect(None) == {}
    assert stragglers.detect(1.0) == {RANK: 0, EXCESS: 1.0}
