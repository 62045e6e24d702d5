"""All metrics of torchmetrics, logged by three ranks, give the result of a single process with all data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from merging import Ranks
from torchmetrics_cases import LEFT_OUT, Case, all_names, cases, configurations, public_classes
from torchmetrics_inputs import Draw, Inputs

pytestmark = pytest.mark.slow

# Batches of each rank. Rank 0, which computes, has no data at first: what some classes learn from their first
# batch, it must receive from other ranks. The objects are the same in all.
SPLITS = ((0, 1, 2), (1, 1, 1), (2, 0, 1))
BATCHES = 3
TOLERANCE = {"rel_tol": 1e-4, "abs_tol": 1e-5}  # states are float32, and summed in another order than in one process


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def drawn(inputs: Inputs, turn: int) -> tuple[Any, ...]:
    return inputs(Draw(turn))


def seed(number: int) -> None:
    """Seed the generators that metrics use. `torch.manual_seed` takes longer, because of missing devices."""
    torch.default_generator.manual_seed(number)


def update(metric: Any, case: Case, turns: Sequence[int]) -> None:
    for turn in turns:
        seed(turn)
        metric.update(*drawn(case.inputs, turn))


def computed(metric: Any) -> dict[str, Any]:
    """Return the values of one process, by suffix of the name."""
    seed(0)
    return flat(metric.compute())


def flat(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {f"/{key}{rest}": part for key, inner in value.items() for rest, part in flat(inner).items()}
    return {"": plain(value)}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def is_close(got: Any, wanted: Any) -> bool:
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(is_close, got, wanted))
    if isinstance(got, (int, float)) and isinstance(wanted, (int, float)):
        return (math.isnan(got) and math.isnan(wanted)) or math.isclose(got, wanted, **TOLERANCE)
    return bool(got == wanted)


def differences(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the differences as text; empty if there are none."""
    if got.keys() != wanted.keys():
        return f"it has {sorted(got)}, but should have {sorted(wanted)}"
    return "; ".join(
        f"{name!r} is {got[name]}, not {wanted[name]}" for name in got if not is_close(got[name], wanted[name])
    )


def failures(case: Case) -> Iterator[str]:
    one, ranks = case.make(), Ranks(len(SPLITS[0]))
    update(one, case, range(BATCHES))
    wanted = computed(one)
    metrics = [case.make() for _ in SPLITS[0]]
    for counts in SPLITS:
        turns = iter(range(BATCHES))
        for metric, count in zip(metrics, counts, strict=True):
            metric.reset()
            update(metric, case, [next(turns) for _ in range(count)])
        seed(0)
        if found := differences(ranks.log(metrics), wanted):
            yield f"{case.name} with {counts} batches: {found}"


@pytest.mark.parametrize("metric", all_names())
def test_three_ranks_give_the_value_of_one_process(metric: str, caplog: pytest.LogCaptureFixture) -> None:
    found = [failure for case in cases() if case.metric == metric for failure in failures(case)]
    assert not found, "\n".join(found)
    assert not caplog.messages


@pytest.mark.parametrize("metric", all_names())
def test_ranks_may_have_logged_without_data(metric: str, caplog: pytest.LogCaptureFixture) -> None:
    for case in (case for case in cases() if case.metric == metric):
        one, ranks = case.make(), Ranks(2)
        metrics = [case.make() for _ in range(2)]
        seed(0)
        without = ranks.log(metrics)
        try:
            wanted = computed(one)
        except Exception:  # noqa: BLE001  # many classes cannot compute without data
            assert without == {}
            (message,) = caplog.messages
            assert "is left out of its row: rank 0 could not compute it from the states of all ranks" in message
        else:
            assert not differences(without, wanted), case.name
        caplog.clear()
        update(metrics[1], case, range(BATCHES))
        update(one, case, range(BATCHES))
        seed(0)
        assert not differences(ranks.log(metrics), computed(one)), case.name
        assert not caplog.messages


# The table


def test_every_public_metric_is_covered_or_excluded_with_a_reason() -> None:
    left_out = " ".join(LEFT_OUT.values()).split()
    assert len(left_out) == len(set(left_out))
    assert not set(left_out) & set(all_names())
    missing = public_classes().keys() - set(all_names()) - set(left_out)
    assert not missing, f"torchmetrics has {sorted(missing)}: give each a row in tests/support/torchmetrics_cases.py"


@pytest.mark.newest
def test_the_table_contains_only_metrics_of_torchmetrics() -> None:
    assert len(cases()) == configurations()
    assert not {*all_names(), *" ".join(LEFT_OUT.values()).split()} - public_classes().keys()
