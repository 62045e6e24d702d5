"""Patience with other ranks. Time is an argument, so nothing waits."""

from __future__ import annotations

import pytest

from dist_wandb.exchange.protocol.contributors import NEVER
from dist_wandb.exchange.reports import NEW_NAME_HEARTBEATS
from dist_wandb.exchange.turns import Pacer
from dist_wandb.settings.options import Limits

NONE = NEVER, NEVER  # of new names, and of all, is overdue
LIMITS = Limits(peer_timeout=60.0, heartbeat=1.0)


@pytest.fixture
def pacer() -> Pacer:
    return Pacer(LIMITS, 0.0)


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


def test_closed_cells_are_never_overdue(pacer: Pacer) -> None:
    pass_time(pacer, 30.0, oldest=1)
    assert pacer.begin_round(30.5, 62, None) == NONE
    assert pacer.begin_round(31.0, 63, 62) == NONE, "the time before they were opened does not count"


def test_rounds_before_the_oldest_cell_are_forgotten(pacer: Pacer) -> None:
    pass_time(pacer, 30.0, oldest=1)
    pacer.begin_round(30.5, 62, 60)
    assert pacer.begin_round(31.0, 63, 60) == NONE
    assert pacer.begin_round(34.5, 64, 60) == NONE, "a gap of three heartbeats and a half counts as two"


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


def test_patience_scales_with_the_heartbeat() -> None:
    pacer = Pacer(Limits(peer_timeout=60.0, heartbeat=0.25), 0.0)
    assert pacer.new_name_patience == 1.25
    pacer.begin_round(0.0, 1, 1)
    assert not pacer.is_held_up(1.25)
    assert pacer.is_held_up(1.26)
    assert pacer.begin_round(0.75, 2, 1) == NONE  # of which half a second counts
