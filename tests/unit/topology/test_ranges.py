"""Ranks in few words."""

from __future__ import annotations

import pytest

from dist_wandb.topology.ranges import ranges_of


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
def test_ranks_as_ranges(ranks: list[int], words: str) -> None:
    assert ranges_of(ranks) == words
