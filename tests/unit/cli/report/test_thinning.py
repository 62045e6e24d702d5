from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.cli.report.thinning import Budget, Curve

finite = st.floats(-1e6, 1e6)


def curve_of(ys: list[float], xs: list[float] | None = None, budget: Budget | None = None) -> Curve:
    x = np.array(xs or range(len(ys)), float)
    return Curve(budget or Budget(10**6), "_step", x, np.array(ys, float))


@given(st.lists(finite, min_size=1, max_size=300), st.sampled_from([16, 32, 512]))
def test_minima_maxima_sums_and_numbers_are_kept(ys: list[float], most: int) -> None:
    curve = curve_of(ys)
    stretches = curve.stretches(most)
    points = curve.points(most)
    assert len(stretches.number) <= most
    assert stretches.number.sum() == len(ys)
    assert stretches.total.sum() == pytest.approx(sum(ys), abs=1e-3)
    assert {min(y for _, y in points), max(y for _, y in points)} == {min(ys), max(ys)}
    assert {(x, y) for x, y in points} <= set(enumerate(ys))


def test_curves_share_a_budget() -> None:
    budget = Budget(1000)
    curves = [curve_of(list(map(float, range(5000))), budget=budget) for _ in range(20)]
    assert sum(len(curve.stretches().number) for curve in curves) <= 1000
    for curve in curves:
        assert {0.0, 4999.0} <= {y for _, y in curve.points()}


def test_values_that_are_not_finite_are_counted_and_leave_a_gap() -> None:
    curve = curve_of([1.0, math.nan, math.inf, 2.0, -math.inf])
    assert curve.points() == [(0, 1.0), (3, 2.0)]
    assert (curve.gaps, curve.last) == (3, -math.inf)
