"""Running statistics of a metric in bounded memory."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.wandb_files.statistics import TREND_LENGTH, RunningMetric, Trend


@given(st.lists(st.floats(), min_size=1) | st.lists(st.floats(), min_size=63, max_size=200))
def test_statistics_are_those_of_the_whole_series(values: list[float]) -> None:
    metric = RunningMetric()
    for value in values:
        metric.add(value)
    found = metric.history()
    ordered = [value for value in values if not math.isnan(value)] or [math.nan]
    assert found.count == len(values)
    assert found.not_finite == sum(not math.isfinite(value) for value in values)
    assert repr((found.last, found.smallest, found.largest)) == repr((values[-1], min(ordered), max(ordered)))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=150), st.integers(1, 40))
def test_a_trend_is_the_means_of_equal_stretches_in_bounded_memory(values: list[float], together: int) -> None:
    room = 8
    trend = Trend(room)
    for begin in range(0, len(values), together):
        trend.add_all(values[begin : begin + together])
    length = 1
    while len(values) > room * length:
        length *= 2
    assert len(trend.means()) == math.ceil(len(values) / length)
    for index, mean in enumerate(trend.means()):
        finite = [value for value in values[index * length : (index + 1) * length] if math.isfinite(value)]
        expected = math.fsum(finite) / len(finite) if finite else math.nan
        assert mean == pytest.approx(expected, rel=1e-9, abs=1e-6, nan_ok=True)


def test_a_trend_of_the_largest_floats_does_not_overflow() -> None:
    trend = Trend()
    for _ in range(2 * TREND_LENGTH):
        trend.add_all([1.7e308] * 2)
    assert trend.means() == pytest.approx([1.7e308] * TREND_LENGTH)


def test_a_history_of_many_metrics_takes_little_memory() -> None:
    metric = RunningMetric()
    for value in range(TREND_LENGTH):  # the most that a metric takes
        metric.add(value)
    before = metric.history()
    tracemalloc.start()
    metrics = []
    for _ in range(100):
        metric = RunningMetric()
        for value in range(TREND_LENGTH):
            metric.add(value)
        metrics.append(metric)
    room = tracemalloc.get_traced_memory()[0] / len(metrics)
    tracemalloc.stop()
    assert room < 8000  # it was once 45,000
    assert metric.history() == before


def test_the_values_of_metrics_that_name_ranks_are_counted() -> None:
    metric, plain = RunningMetric(counted=True), RunningMetric()
    for value in [3, 1, 3.0, math.nan, 3, *range(10_000)]:
        metric.add(value)
        plain.add(value)
    found = metric.history()
    assert found.counts[:2] == ((3, 4), (1, 2))
    assert len(found.counts) <= 4096
    assert plain.history().counts == ()
