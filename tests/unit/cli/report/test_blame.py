from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from dist_wandb.cli.report.page import HeatMap
from dist_wandb.cli.report.thinning import Blame


def blame_of(ranks: int, slow: Sequence[int], rows: int, seed: int) -> Blame:
    """Return rows of a job whose ranks take 0.1 s with 3 % noise; some ranks take longer."""
    draw = random.Random(seed)
    found = []
    for step in range(rows):
        times = [0.1 * draw.gauss(1, 0.03) * (1.3 if rank in slow else 1.0) for rank in range(ranks)]
        mean = sum(times) / ranks
        worst = max(range(ranks), key=times.__getitem__)
        found.append((step, worst, times[worst] - mean, mean))
    return of_rows(*found)


def of_rows(*rows: tuple[float, float, float, float], name: str = "time/step") -> Blame:
    return Blame(name, "global_step", *np.array(rows, float).T)


@pytest.mark.parametrize(
    ("ranks", "slow", "who"),
    [(2, [1], "rank 1"), (8, [7], "rank 7"), (256, [255], "rank 255"), (16, [8, 9, 10, 11], "ranks 8-11")],
)
def test_ranks_that_take_30_percent_longer_are_named_each_time(ranks: int, slow: list[int], who: str) -> None:
    for seed in range(20):
        found = blame_of(ranks, slow, 100, seed).slowest(ranks)
        assert found is not None
        assert (found.ranks, found.who, found.stands_out) == (slow, who, True)
        assert found.excess == pytest.approx(0.03 * (ranks - len(slow)) / ranks, rel=0.5)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_no_rank_is_named_if_all_are_alike(ranks: int) -> None:
    for seed in range(50):
        found = blame_of(ranks, [], 200, seed).slowest(ranks)
        assert found is not None
        assert not found.stands_out


def heat(blame: Blame, world: int | None) -> HeatMap:
    found = blame.heat_map(world)
    assert found is not None
    return found


def test_the_heat_map_has_a_row_for_each_rank_and_shows_when() -> None:
    found = heat(of_rows(*((step, 1 if step < 5000 else 3, 0.5, 1.0) for step in range(10_000))), 6)
    assert found.ranks == [f"rank {rank}" for rank in range(6)]
    assert len(found.edges) == len(found.cells[0]) + 1 <= 129
    middle = next(place for place, edge in enumerate(found.edges) if edge >= 5000)
    assert set(found.cells[1][: middle - 1]) == {0.5}
    assert set(found.cells[1][middle:]) == {0.0}
    assert set(found.cells[3][middle:-1]) == {0.5}
    assert set(found.cells[0]) == {0.0}


def test_rows_that_name_no_rank_count_as_rows() -> None:
    ranks = [rank for step in range(10) for rank in (2 if step % 2 else math.nan, -1)]
    found = of_rows(*((0, rank, 0.1, math.nan) for rank in ranks), name="time/straggler_rank").slowest(4)
    assert found is not None
    assert (found.ranks, found.share) == ([2], 0.25)
    assert math.isnan(found.relative)


@pytest.mark.parametrize("rank", [math.nan, math.inf, -1, 1.5, 10**9])
def test_invalid_ranks_are_ignored(rank: float) -> None:
    blame = of_rows((0, rank, 1.0, 1.0))
    assert blame.heat_map(4) is None
    assert blame.slowest(4) is None
