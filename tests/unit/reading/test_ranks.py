"""Which rank is slow, and that none is named where all are alike."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dist_wandb.reading.ranks import by_rank, slow_rank
from dist_wandb.wandb_files.statistics import MetricHistory, RunningMetric


def metrics_of(slowest: list[int], excess: float = 0.03, step: float = 0.1) -> dict[str, MetricHistory]:
    found = {}
    columns: dict[str, Sequence[float]] = {
        "straggler_rank": slowest,
        "straggler_excess": [excess] * 5,
        "step": [step] * 5,
    }
    for name, values in columns.items():
        metric = RunningMetric(counted=name == "straggler_rank")
        for value in values:
            metric.add(value)
        found[f"time/{name}"] = metric.history()
    return found


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_where_ranks_are_alike_none_is_named_by_chance(ranks: int) -> None:
    draw = random.Random(ranks)
    named = 0
    for _ in range(200):
        rows = draw.choice([10, 50, 500])
        slowest = [draw.randrange(ranks) for _ in range(rows)]
        named += slow_rank(metrics_of(slowest), ranks) is not None
    assert named <= 10  # one in 20


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_that_is_mostly_the_slowest_is_named_every_time(ranks: int) -> None:
    draw = random.Random(ranks)
    for _ in range(20):
        slowest = [1 if draw.random() < 0.95 else draw.randrange(ranks) for _ in range(60)]
        found = slow_rank(metrics_of(slowest), ranks)
        assert found is not None
        assert (found.rank, found.rows, found.times) == (1, 60, slowest.count(1))


def test_a_rank_that_is_slowest_by_next_to_nothing_is_not_named() -> None:
    assert slow_rank(metrics_of([1] * 50, excess=0.001), 4) is None
    assert slow_rank(metrics_of([1] * 5), 4) is None
    assert slow_rank({}, 4) is None


def test_names_of_ranks_follow_the_name_that_they_are_of() -> None:
    names = ["rank-10/val/acc", "a", "worker-1-rank-2/a", "rank-2/val/acc", "val/acc", "rank-1/only", "z"]
    assert by_rank(names) == [
        "a", "worker-1-rank-2/a", "rank-1/only", "val/acc", "rank-2/val/acc", "rank-10/val/acc", "z"
    ]  # fmt: skip
