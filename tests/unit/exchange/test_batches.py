"""The contributions that wait on several ranks, merged in an order that agrees with the order on each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_wandb.exchange.protocol.batches import Row, Run, Slot, decoded, encoded, merged

positions = st.sampled_from([(0, 0), (0, 1), (0, 2), (0, 5), (1, 0)])
cells = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=3, unique=True)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """The rows that one rank offers."""
    found = draw(st.lists(st.tuples(positions, cells), max_size=8))
    return [tuple(Slot(*position, *cell) for cell in row) for position, row in found]


def lines(first: int, last: int, *names: int, stride: int = 1, step: bool = True) -> list[Row]:
    """One row per step, or per count."""
    return [
        tuple(Slot(0, at, name, 0) if step else Slot(1, 0, name, at) for name in names)
        for at in range(first, last, stride)
    ]


def one_by_one(offers: Sequence[Sequence[Row]]) -> list[list[Slot]]:
    return [[slot for row in offered for slot in row] for offered in offers]


@given(rows())
@settings(deadline=None)
def test_rows_survive_encoding_and_decoding(rows: list[Row]) -> None:
    cells = sum(map(len, rows))
    assert decoded((Run(*run) for run in json.loads(json.dumps(encoded(rows)))), cells) == rows


@pytest.mark.parametrize("number", [-1, 1.0, True, "2", None, 12, 10**12, 10**400])
def test_oversized_runs_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="a rank sent"):
        decoded([Run(0, 0, 1, number, [0, 1], [0, 0])], 20)
    with pytest.raises(ValueError, match="a rank sent"):
        decoded([Run(0, 0, 1, 10**9, [], [])], 20)
    assert len(decoded([Run(0, 0, 1, 11, [0, 1], [0, 0])], 20)) == 11


def test_a_burst_of_rows_has_a_short_encoding() -> None:
    assert encoded(lines(7, 1007, 0, 1)) == [Run(0, 7, 1, 1000, [0, 1], [0, 0])]
    assert encoded(lines(50, 0, 0, stride=-5)) == [Run(0, 50, -5, 10, [0], [0])]
    assert encoded(lines(3, 9, 2, step=False)) == [Run(1, 0, 0, 6, [2], [3])]
    assert len(encoded([*lines(0, 5, 0), *lines(5, 9, 0, 1), *lines(9, 12, 0)])) == 3


@given(st.lists(rows(), max_size=4), st.integers(1, 40))
@settings(deadline=None)
def test_merged_offers_contain_each_slot_once(offers: list[list[Row]], most: int) -> None:
    everything = {slot for offered in one_by_one(offers) for slot in offered}
    found = merged(offers, 10**6)
    assert (len(found), set(found)) == (len(everything), everything)
    cut = merged(offers, most)
    assert cut == found[: len(cut)]
    assert len(cut) >= min(most, len(found))


def test_ranks_in_step_get_the_list_of_the_rank_ahead() -> None:
    ahead, behind = lines(0, 9, 0, 1), lines(0, 4, 0, 1)
    assert merged([behind, ahead, []], 100) == one_by_one([ahead])[0]


def test_rows_of_the_rank_behind_come_first() -> None:
    assert [slot.step for slot in merged([lines(1000, 1010, 0), lines(0, 10, 0)], 12)] == [*range(10), 1000, 1001]


def test_names_of_one_rank_are_part_of_the_row_at_their_step() -> None:
    found = merged([lines(0, 5, 0, 1), lines(0, 5, 0, 2)], 100)
    assert found == one_by_one([lines(0, 5, 0, 1, 2)])[0]


def test_contradictory_orders_are_merged_into_one_list() -> None:
    found = merged([lines(0, 3, 0), list(reversed(lines(0, 3, 0)))], 100)
    assert sorted(found) == one_by_one([lines(0, 3, 0)])[0]


def test_rows_are_not_cut_in_the_middle() -> None:
    assert merged([lines(0, 9, 0, 1, 2)], 4) == one_by_one([lines(0, 2, 0, 1, 2)])[0]
    assert merged([lines(0, 9, 0, 1, 2, step=False)], 4) == one_by_one([lines(0, 2, 0, 1, 2, step=False)])[0]
    found = merged([lines(0, 9, 0, 1), lines(0, 9, 2)], 4)
    assert found == one_by_one([lines(0, 2, 0, 1, 2)])[0]
