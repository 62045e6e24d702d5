"""Compact forms of many ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.job.ranges import blocks_of, named, numbers_in, ranges_of, spans_of, values_in

PAIRS = [rank for rank in range(36) if rank % 3 != 2]  # twelve ranges, of more ranks than are listed individually


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "none"),
        ([3], "3"),
        ([8, 0, 1, 2, 3, 3], "0-3, 8"),
        (range(16_384), "0-16383"),
        (range(0, 32, 8), "0, 8, 16, 24"),
        (range(0, 16_384, 8), "0, 8, 16, ..., 16376"),
    ],
)
def test_ranks_are_grouped_into_ranges(ranks: list[int], words: str) -> None:
    assert ranges_of(ranks) == words


@pytest.mark.parametrize(
    ("ranks", "per_node", "text"),
    [
        ([3], None, "rank 3"),
        ([1, 0], None, "ranks 0, 1"),
        ([0, 2], None, "ranks 0, 2"),
        ([1, 8, 9, 10, 11], None, "ranks 1, 8-11"),
        (range(8, 16), 8, "ranks 8-15 (node 1)"),
        (range(8, 32), 8, "ranks 8-31 (nodes 1-3)"),
        (range(8, 15), 8, "ranks 8-14"),
        ([2, 3, 7], 2, "ranks 2-3 (node 1), 7"),
        ([2, 3], 1, "ranks 2, 3"),
        (range(16_384), 8, "ranks 0-16383 (nodes 0-2047)"),
        (PAIRS, None, f"ranks {', '.join(map(str, PAIRS))}"),
        (range(0, 100, 2), None, f"ranks {', '.join(map(str, range(0, 40, 2)))}, and 30 more"),
    ],
)
def test_messages_name_ranks_in_ranges(ranks: list[int], per_node: int | None, text: str) -> None:
    assert named(ranks, per_node) == text


@given(st.sets(st.integers(0, 60)))
def test_ranges_contain_the_same_numbers(numbers: set[int]) -> None:
    ranges = spans_of(numbers)
    assert numbers_in(ranges) == sorted(numbers)
    assert all(last + 1 < first for (_, last), (first, _) in pairwise(ranges))


@given(st.lists(st.integers(0, 5)))
def test_blocks_contain_the_same_values(values: list[int]) -> None:
    assert values_in(blocks_of(values)) == values
