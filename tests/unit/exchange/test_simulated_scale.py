"""Simulated jobs of many ranks: the store calls and bytes per rank and row do not depend on their number."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.simulate import simulate

pytestmark = pytest.mark.slow

ROW = 1880  # bytes of a row of 20 numbers, at most
MESSAGES = 6  # of a row: what the ranks offer, and its numbers
NODE = tuple(range(8, 16))


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return simulate(32)


def test_store_requests_and_bytes_per_rank_do_not_grow_with_the_number_of_ranks(small: dict[str, Any]) -> None:
    large = simulate(136)
    for found in (small, large):
        assert found["delivered"] == [2 * found["ranks"], 2 * found["ranks"]]
        assert found["members"] == [found["ranks"], found["ranks"]]
        assert found["messages_of_a_row"]["median"] < MESSAGES
        assert found["bytes_of_a_row"]["median"] < ROW
    for what in ("messages_of_a_row", "bytes_of_a_row"):
        assert large[what]["median"] == pytest.approx(small[what]["median"], rel=0.1)
    assert large["keys"]["mean"] == pytest.approx(small["keys"]["mean"], rel=0.2)
    assert large["bytes"]["mean"] == pytest.approx(small["bytes"]["mean"], rel=0.2)
    assert (small["levels"], large["levels"]) == (2, 3)


@pytest.mark.parametrize("killed", [(9,), (8,), NODE], ids=["a rank", "the first of a node", "a node"])
def test_survivors_complete_the_next_row_after_deaths(killed: tuple[int, ...], small: dict[str, Any]) -> None:
    found = simulate(32, killed)
    left = 32 - len(killed)
    assert found["delivered"] == [32 + left, 32 + left]
    assert found["members"] == [left, left]
    assert found["last_row"] < 10  # seconds
    assert found["keys"]["mean"] < 3 * small["keys"]["mean"]


def test_a_late_node_contributes_to_the_next_row(small: dict[str, Any]) -> None:
    found = simulate(32, late=NODE)
    assert found["delivered"] == [24 + 32, 24 + 32]
    assert found["members"] == [32, 32]
    assert found["last_row"] < 1
    assert found["keys"]["mean"] < 3 * small["keys"]["mean"]
