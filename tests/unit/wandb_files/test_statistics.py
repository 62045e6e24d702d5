"""Statistics of a metric, and the trend of its values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.wandb_files.reading import TREND_LENGTH, history_of, trend_of


@given(st.lists(st.floats(), min_size=1, max_size=200))
def test_statistics_are_those_of_the_whole_series(values: list[float]) -> None:
    found = history_of(values)
    ordered = [value for value in values if not math.isnan(value)] or [math.nan]
    assert found.count == len(values)
    assert found.not_finite == sum(not math.isfinite(value) for value in values)
    for one, expected in ((found.last, values[-1]), (found.smallest, min(ordered)), (found.largest, max(ordered))):
        assert one == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), max_size=150))
def test_a_trend_is_the_means_of_equal_stretches(values: list[float]) -> None:
    found = trend_of(values, 8)
    assert len(found) == min(len(values), 8)
    for index, mean in enumerate(found):
        stretch = values[index * len(values) // len(found) : (index + 1) * len(values) // len(found)]
        finite = [value for value in stretch if math.isfinite(value)]
        expected = math.fsum(finite) / len(finite) if finite else math.nan
        assert mean == pytest.approx(expected, rel=1e-9, abs=1e-6, nan_ok=True)


def test_a_trend_of_the_largest_floats_does_not_overflow() -> None:
    assert trend_of([1.7e308] * 4 * TREND_LENGTH) == pytest.approx([1.7e308] * TREND_LENGTH)


def test_the_values_of_metrics_that_name_ranks_are_counted() -> None:
    values = [3, 1, 3.0, math.nan, 3, *range(10_000)]
    found = history_of(values, counted=True)
    assert found.counts[:2] == ((3, 4), (1, 2))
    assert len(found.counts) <= 4096
    assert history_of(values).counts == ()
