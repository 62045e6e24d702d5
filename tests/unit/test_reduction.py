from __future__ import annotations

import re
from types import MappingProxyType

import pytest

from dist_wandb.errors import ConfigurationError
from dist_wandb.reduction import REDUCTIONS, check_reduce, check_spread


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_reduction_is_for_all_names(reduction: str) -> None:
    assert check_reduce(reduction) == {"*": reduction}


def test_the_reductions_are_those_promised() -> None:
    assert REDUCTIONS == ("mean", "sum", "min", "max", "first")


def test_no_reduction_is_none() -> None:
    assert check_reduce(None) is None


def test_a_mapping_keeps_its_patterns_in_their_order() -> None:
    patterns = {"tokens": "sum", "*_max": "max", "*": "mean"}
    checked = check_reduce(MappingProxyType(patterns))
    assert checked is not None
    assert list(checked.items()) == list(patterns.items())


def test_a_mapping_is_copied() -> None:
    patterns = {"tokens": "sum"}
    checked = check_reduce(patterns)
    patterns["loss"] = "mean"
    assert checked == {"tokens": "sum"}


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        ("avg", "reduce='avg' is no reduction. Allowed: 'mean', 'sum', 'min', 'max', 'first'."),
        ("meen", "Did you mean 'mean'?"),
        ("Sum", "Did you mean 'sum'?"),
        (["mean"], "reduce=['mean'] is no reduction."),
        (True, "reduce=True is no reduction."),
        ({"loss": "mean", "tokens": "summ"}, "reduce['tokens']='summ' is no reduction."),
        ({"tokens": "summ"}, "Did you mean 'sum'?"),
        ({"loss": None}, "reduce['loss']=None is no reduction."),
        ({7: "mean"}, "reduce has 7 as a name pattern"),
    ],
)
def test_what_is_no_reduction_is_refused_with_the_nearest(reduce: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_reduce(reduce)


@pytest.mark.parametrize(
    ("spread", "patterns"),
    [
        (True, ("*",)),
        (False, ()),
        ("loss", ("loss",)),
        (["loss", "grad/*"], ("loss", "grad/*")),
        (("loss",), ("loss",)),
        ([], ()),
    ],
)
def test_spread_becomes_patterns(spread: object, patterns: tuple[str, ...]) -> None:
    assert check_spread(spread) == patterns


@pytest.mark.parametrize("spread", [None, 1, 0.5, {"loss"}, {"loss": True}, ["loss", 7], b"loss"])
def test_a_spread_that_is_neither_bool_nor_patterns_is_refused(spread: object) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"spread={spread!r} is neither a bool nor name patterns")):
        check_spread(spread)
