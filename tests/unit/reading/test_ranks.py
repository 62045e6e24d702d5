"""The slow rank in the rows of a run, and names of single ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dist_wandb.reading.runs import by_rank, slow_rank
from dist_wandb.wandb_files.statistics import MetricHistory, RunningMetric


def metrics_of(named: Sequence[int], rows: int, name: str = "time/straggler_rank") -> dict[str, MetricHistory]:
    columns: dict[str, Sequence[float]] = {name: named, "time/straggler_excess": [0.03] * 5, "time/step": [0.1] * rows}
    found = {}
    for title, values in columns.items():
        metric = RunningMetric(counted=title == name)
        for value in values:
            metric.add(value)
        found[title] = metric.history()
    return found


def test_the_rank_that_rows_name_most_often_is_named() -> None:
    found = slow_rank(metrics_of([3] * 30 + [1] * 10 + [3] * 10, rows=80))
    assert found is not None
    assert (found.rank, found.times, found.rows) == (3, 40, 80)
    assert found.excess == pytest.approx(0.03)


@pytest.mark.parametrize("named", [[], [2] * 4], ids=["never", "in 4 of 100 rows"])
def test_a_rank_that_few_rows_name_is_not_reported_for_the_run(named: list[int]) -> None:
    assert slow_rank(metrics_of(named, rows=100)) is None
    assert slow_rank(metrics_of([2] * 5, rows=100)) is not None


def test_other_names_of_ranks_do_not_count() -> None:
    assert slow_rank(metrics_of([2] * 50, rows=50, name="loss/argmax_rank")) is None


def test_names_of_ranks_follow_the_plain_name() -> None:
    names = ["rank-10/val/acc", "a", "worker-1-rank-2/a", "rank-2/val/acc", "val/acc", "rank-1/only", "z"]
    assert by_rank(names) == [
        "a", "worker-1-rank-2/a", "rank-1/only", "val/acc", "rank-2/val/acc", "rank-10/val/acc", "z"
    ]  # fmt: skip
