"""Options: limits, reductions, and the definitions of metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest

import dist_wandb
from dist_wandb.errors import ConfigurationError
from dist_wandb.settings.options import LIMIT_NAMES, Limits
from dist_wandb.settings.reduction import Definitions, check_patterns, check_reduce, reduction_of


@pytest.mark.parametrize("value", [2e9, float("inf")])
def test_limits_too_large_for_clocks_are_refused(value: float) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"peer_timeout must be at most 1e+09, got {value!r}.")):
        Limits(peer_timeout=value)


@pytest.mark.parametrize(("given", "flush", "upload"), [(None, 60.0, 600.0), (5, 5, 5)])
def test_finish_timeout_bounds_the_ranks_and_the_upload(given: float | None, flush: float, upload: float) -> None:
    limits = Limits(finish_timeout=given)
    assert (limits.flush_timeout, limits.upload_timeout) == (flush, upload)


@pytest.mark.parametrize("name", LIMIT_NAMES)
def test_a_separate_limit_is_refused_with_a_hint_to_limits(name: str) -> None:
    given: dict[str, Any] = {name: 7}
    message = (
        f"dist_wandb.init got the argument {name!r}, which is one of the limits. Pass limits=dist_wandb.Limits({name}="
    )
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        dist_wandb.init(**given)


def test_patterns_work_as_in_fnmatch_but_case_sensitively() -> None:
    patterns = check_reduce({"Loss": "sum", "l?": "min", "[ab]*": "max"})
    assert patterns is not None
    matched = {name: reduction_of(name, patterns)[0] for name in ("loss", "Loss", "lr", "apple", "c")}
    assert matched == {"loss": "", "Loss": "Loss", "lr": "l?", "apple": "[ab]*", "c": ""}


@pytest.mark.parametrize(
    ("reduce", "message"),
    [
        ("avg", "reduce='avg' is not a reduction. Allowed: 'mean', 'sum', 'min', 'max', 'first', 'nanmean', 'nansum'."),
        ("meen", "Did you mean 'mean'?"),
        ("Sum", "Did you mean 'sum'?"),
        (["mean"], "reduce=['mean'] is not a reduction."),
        (True, "reduce=True is not a reduction."),
        ({"loss": "mean", "tokens": "summ"}, "reduce['tokens']='summ' is not a reduction."),
        ({"tokens": "summ"}, "Did you mean 'sum'?"),
        ({"loss": None}, "reduce['loss']=None is not a reduction."),
        ({"loss": "auto"}, "reduce['loss']='auto' is not a reduction."),
        ({7: "mean"}, "reduce has 7 as a name pattern"),
    ],
)
def test_an_unknown_reduction_is_refused_and_the_nearest_suggested(reduce: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        check_reduce(reduce)


@pytest.mark.parametrize(
    ("given", "patterns"),
    [(True, ("*",)), (False, ()), ("loss", ("loss",)), (["a", "b*"], ("a", "b*")), ((), ())],
)
def test_arguments_that_select_names_become_patterns_and_others_are_refused(
    given: object, patterns: tuple[str, ...]
) -> None:
    assert check_patterns("per_rank", given) == patterns
    for other in (None, 1, {"loss"}, {"loss": True}, ["loss", 7], b"loss", [True]):
        message = f"per_rank={other!r} is neither a bool nor name patterns."
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            check_patterns("per_rank", other)


def test_definitions_of_metrics_are_combined_as_in_wandb() -> None:
    """As measured with wandb 0.31: exact names first; summaries are added; once an axis is added, it is for good."""
    definitions = Definitions("global_step")
    off, epoch = {"step_sync": False}, {"step_metric": "epoch"}
    for name, given in (
        *(("*", epoch), ("train/*", {"step_metric": "batch"}), ("train/x", {}), ("b", {"step_metric": "batch", **off})),
        *(("a", epoch), ("a", {"summary": "min"}), ("a", {"summary": "Max"}), ("c", {**epoch, **off}), ("c", epoch)),
        *(("d", epoch), ("d", {**epoch, **off}), ("e", epoch), ("e", {"summary": "none", "overwrite": True})),
        *(("f", {"step_metric": "global_step"}), ("g", {"summary": "copy"}), ("h?", {"summary": "max"})),
    ):
        definitions = definitions.followed_by(name, given, len(definitions.given))
    found = [definitions.axis_of(name) for name in ("train/loss", "train/x", "val", *"abcde")]
    assert found == ["batch", None, "epoch", "epoch", None, "epoch", "epoch", None]
    assert definitions.axes == {"epoch": 0, "batch": 1}
    summaries = {name: definitions.summary_of(name) for name in (*"abeg", "hi")}
    assert summaries == {"a": ("min", "max"), "b": (), "e": ("none",), "g": (), "hi": ()}
