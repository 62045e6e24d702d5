"""Statistics of a metric, and the trend of its values."""

from __future__ import annotations

import math

import pytest

from dist_wandb.wandb_files.reading import TREND_LENGTH, history_of, trend_of


def test_a_trend_of_the_largest_floats_does_not_overflow() -> None:
    assert trend_of([1.7e308] * 4 * TREND_LENGTH) == pytest.approx([1.7e308] * TREND_LENGTH)


def test_the_values_of_metrics_that_name_ranks_are_counted() -> None:
    values = [3, 1, 3.0, math.nan, 3, *range(10_000)]
    found = history_of(values, counted=True)
    assert found.counts[:2] == ((3, 4), (1, 2))
    assert len(found.counts) <= 4096
    assert history_of(values).counts == ()
