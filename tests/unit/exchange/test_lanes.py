"""The arithmetic of reductions: exact where float64 allows it, honest about NaN and infinity."""

from __future__ import annotations

import functools
import math

import pytest

from dist_wandb.exchange.protocol.lanes import (
    NO_NUMBER,
    Number,
    number_of,
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


@pytest.mark.parametrize("reduction", MEANS)
def test_one_nan_makes_the_result_nan(reduction: str) -> None:
    assert math.isnan(total(1.0, math.nan, 3.0).reduced(reduction))


def test_infinities_appear_in_the_result() -> None:
    with_infinity = total(1.0, math.inf)
    assert [with_infinity.reduced(reduction) for reduction in ("mean", "sum", "max", "min")] == [math.inf] * 3 + [1.0]
    assert math.isnan(total(math.inf, -math.inf).reduced("mean"))
