"""The arithmetic of reductions: exact where float64 allows it, honest about NaN and infinity."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_wandb.exchange.protocol.aggregates import Totals
from dist_wandb.settings.reduction import LARGEST_EXACT_INTEGER, REDUCTIONS, matches_any


def totals(*contributions: tuple[float, float] | float) -> Totals:
    result = Totals()
    for contribution in contributions:
        value, weight = contribution if isinstance(contribution, tuple) else (contribution, 1.0)
        result += Totals.of(value, weight)
    return result


def test_the_mean_is_weighted() -> None:
    assert totals((1.0, 3.0), (2.0, 1.0)).reduced("mean") == 1.25


def test_the_weighted_mean_of_a_constant_is_exact() -> None:
    assert totals((0.1, 3.0), (0.1, 2.0), (0.1, 0.7)).reduced("mean") == 0.1


def test_a_weight_of_zero_counts_as_contributor_but_not_as_number() -> None:
    with_zero = totals((5.0, 0.0), (1.0, 2.0))
    assert (with_zero.contributors, with_zero.number) == (2, 1)
    assert [with_zero.reduced(reduction) for reduction in ("mean", "sum", "min", "max")] == [1.0] * 4


@pytest.mark.parametrize("reduction", ["mean", "min", "max"])
def test_equal_integers_stay_integers(reduction: str) -> None:
    value = totals(7, 7, 7).reduced(reduction)
    assert (value, type(value)) == (7, int)


def test_a_sum_of_integers_is_an_integer() -> None:
    assert isinstance(totals(2, 3).reduced("sum"), int)


def test_unequal_integers_have_a_float_mean() -> None:
    assert totals(1, 2).reduced("mean") == 1.5


@pytest.mark.parametrize("value", [LARGEST_EXACT_INTEGER, -LARGEST_EXACT_INTEGER, LARGEST_EXACT_INTEGER - 1])
def test_integers_are_exact_up_to_2_to_the_53(value: int) -> None:
    assert totals(value, value).reduced("mean") == value


def test_larger_integers_become_floats() -> None:
    assert isinstance(totals(2**60).reduced("max"), float)


@given(st.lists(st.one_of(st.just(math.nan), st.floats(-1e9, 1e9)), min_size=1, max_size=9))
def test_nansum_and_nanmean_equal_those_of_numpy(values: list[float]) -> None:
    result = sum((Totals.of(value).without_nan() for value in values), Totals())
    assert (result.contributors, result.number) == (len(values), len(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of a mean of nothing
        means, sums = np.nanmean(values), np.nansum(values)
    np.testing.assert_allclose(result.reduced("nanmean"), means, rtol=1e-12, atol=1e-6)
    np.testing.assert_allclose(result.reduced("nansum"), sums, rtol=1e-12, atol=1e-6)


@pytest.mark.parametrize("reduction", [reduction for reduction in REDUCTIONS if reduction != "first"])
def test_one_nan_makes_the_result_nan(reduction: str) -> None:
    assert math.isnan(totals(1.0, math.nan, 3.0).reduced(reduction))


def test_infinities_appear_in_the_result() -> None:
    with_infinity = totals(1.0, math.inf)
    assert [with_infinity.reduced(reduction) for reduction in ("mean", "sum", "max", "min")] == [math.inf] * 3 + [1.0]
    assert math.isnan(totals(math.inf, -math.inf).reduced("mean"))


numbers = st.floats(-1e6, 1e6) | st.integers(-1000, 1000)


@given(st.lists(st.tuples(numbers, st.sampled_from([0.0, 0.5, 1.0, 8.0])), min_size=1), st.randoms())
def test_the_order_of_contributions_does_not_matter(contributions: list[tuple[float, float]], random: object) -> None:
    before = totals(*contributions)
    random.shuffle(contributions)  # type: ignore[attr-defined]  # hypothesis's random.Random
    after = totals(*contributions)
    assert (after.contributors, after.number, after.integers, after.largest, after.smallest) == (
        *(before.contributors, before.number, before.integers),
        *(before.largest, before.smallest),
    )
    assert after.plain == pytest.approx(before.plain, abs=1e-6)


@given(numbers | st.just(math.nan) | st.just(-math.inf), st.sampled_from([0.0, 1.0, 2.5]))
def test_totals_survive_packing_into_lanes(value: float, weight: float) -> None:
    original = Totals.of(value, weight)
    summed, largest = original.lanes()
    lanes = (9.0, *summed), (9.0, 9.0, *largest)
    assert repr(Totals.from_lanes(lanes[0], 1, lanes[1], 2)) == repr(original)  # by text: NaN is not equal to itself


def test_patterns_are_case_sensitive() -> None:
    assert matches_any("val/loss", ["train/*", "val/*"])
    assert not matches_any("Val/loss", ["val/*"])
