"""The arithmetic of reductions: exact where float64 allows it, honest about NaN and infinity."""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.exchange.protocol.lanes import (
    NO_NUMBER,
    Number,
    lanes_of,
    lanes_of_floats,
    number_at,
    number_of,
    reduced_numbers,
)
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER, REDUCTIONS

MEANS = [reduction for reduction in REDUCTIONS if reduction != "first"]


def total(*contributions: tuple[float, float] | float, ignores_nan: bool = False) -> Number:
    given = [one if isinstance(one, tuple) else (one, 1.0) for one in contributions]
    return functools.reduce(Number.plus, [number_of(x, w, ignores_nan=ignores_nan) for x, w in given], NO_NUMBER)


def test_the_weighted_mean_of_a_constant_is_exact() -> None:
    assert total((0.1, 3.0), (0.1, 2.0), (0.1, 0.7)).reduced("mean") == 0.1


@pytest.mark.parametrize("value", [LARGEST_EXACT_INTEGER, -LARGEST_EXACT_INTEGER, LARGEST_EXACT_INTEGER - 1])
def test_integers_are_exact_up_to_2_to_the_53(value: int) -> None:
    assert total(value, value).reduced("mean") == value


@pytest.mark.parametrize(("value", "result"), [(2**60, 2.0**60), (10**400, math.inf), (-(10**400), -math.inf)])
def test_larger_integers_become_floats(value: int, result: float) -> None:
    reduced = total(value).reduced("max")
    assert (reduced, type(reduced)) == (result, float)


@given(st.lists(st.one_of(st.just(math.nan), st.floats(-1e9, 1e9)), min_size=1, max_size=9))
def test_nansum_and_nanmean_equal_those_of_numpy(values: list[float]) -> None:
    result = total(*values, ignores_nan=True)
    assert result.given == len(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of a mean of nothing
        means, sums = np.nanmean(values), np.nansum(values)
    np.testing.assert_allclose(result.reduced("nanmean"), means, rtol=1e-12, atol=1e-6)
    np.testing.assert_allclose(result.reduced("nansum"), sums, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("reduction", MEANS)
def test_one_nan_makes_the_result_nan(reduction: str) -> None:
    assert math.isnan(total(1.0, math.nan, 3.0).reduced(reduction))


def test_infinities_appear_in_the_result() -> None:
    with_infinity = total(1.0, math.inf)
    assert [with_infinity.reduced(reduction) for reduction in ("mean", "sum", "max", "min")] == [math.inf] * 3 + [1.0]
    assert math.isnan(total(math.inf, -math.inf).reduced("mean"))


numbers = st.floats(-1e6, 1e6) | st.integers(-1000, 1000)
weights = st.sampled_from([0.0, 0.5, 1.0, 8.0])


@given(
    st.lists(st.tuples(numbers, weights), min_size=1).flatmap(lambda one: st.tuples(st.just(one), st.permutations(one)))
)
def test_the_order_of_contributions_does_not_matter(
    orders: tuple[list[tuple[float, float]], list[tuple[float, float]]],
) -> None:
    before, after = (total(*order) for order in orders)
    assert (after.counts, after.largest, after.minus_smallest) == (before.counts, before.largest, before.minus_smallest)
    assert after.plain == pytest.approx(before.plain, abs=1e-6)


@given(st.lists(st.tuples(numbers | st.just(math.nan) | st.just(-math.inf), weights), min_size=1))
def test_numbers_survive_packing_into_lanes(contributions: list[tuple[float, float]]) -> None:
    originals = [number_of(*one) for one in contributions]
    lanes = lanes_of(originals)
    found = [number_at(*lanes, index, len(originals)) for index in range(len(originals))]
    assert repr(found) == repr(originals)  # by text: NaN is not equal to itself


@given(st.lists(st.floats(allow_nan=True), max_size=5), weights)
def test_lanes_of_floats_are_those_of_each(values: list[float], weight: float) -> None:
    found = lanes_of_floats(values, weight)
    if found is not None:
        assert found == lanes_of([number_of(value, weight) for value in values])
        assert not any(map(math.isnan, values))
    elif weight:
        assert not all(map(math.isfinite, values))


@given(st.lists(st.lists(numbers | st.just(math.nan), min_size=2, max_size=2), min_size=1), st.sampled_from(MEANS))
def test_results_of_a_row_are_those_of_each_name(columns: list[list[float]], reduction: str) -> None:
    each = [total(*column) for column in columns]
    how = ["mean", *[reduction] * (len(each) - 1)]
    expected = [number.reduced(one) for number, one in zip(each, how, strict=True)]
    assert repr(reduced_numbers(*lanes_of(each), how, 2)) == repr(expected)
