"""How often ranks poll the job's store."""

from __future__ import annotations

import pytest

from dist_wandb.store.polling import Interval, first_pause, interval, next_pause, poll


def looks(seconds: float, longest_pause: float, ranks: int) -> int:
    """Return the number of polls of one rank within a time."""
    number, now, pause = 1, 0.0, first_pause(longest_pause, ranks)
    while now < seconds:
        waited, now, number = now, now + pause, number + 1
        pause = next_pause(pause, waited, longest_pause, ranks)
    return number


@pytest.mark.parametrize("ranks", [2, 64, 512, 1024, 16_384])
def test_polling_slows_down_over_time(ranks: int) -> None:
    assert looks(60.0, 0.05, ranks) <= 160
    assert looks(5.0, 0.05, ranks) <= 45
    assert looks(600.0, 0.05, ranks) - looks(540.0, 0.05, ranks) <= 121


def test_the_polling_rate_of_many_ranks_is_bounded() -> None:
    assert [ranks / interval(0.5, ranks) for ranks in (2, 256, 512, 2560)] == [4, 512, 512, 512]
    assert interval(0.5, 16_384) == 5.0
    assert interval(7.0, 16_384) == 7.0
    for ranks in (64, 1024, 16_384):
        assert ranks / first_pause(0.05, ranks) <= 16_384 / 0.05


def test_polling_ends_at_the_limit() -> None:
    calls: list[int] = []
    assert poll(lambda: calls.append(1), 0.0, 0.05) is None
    assert len(calls) == 1
    assert poll(lambda: 7, 0.0, 0.05) == 7


def test_an_interval_starts_when_the_previous_one_is_over() -> None:
    every = Interval(0.5, 2)
    assert [every.is_over(now) for now in (7.0, 7.4, 7.6, 8.0, 8.1)] == [True, False, True, False, True]
