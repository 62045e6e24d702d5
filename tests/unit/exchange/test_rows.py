"""From contributions to rows: ranks in one process, with rounds reduced by hand."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import row_units
import torch
import wandb
from hypothesis import given
from hypothesis import strategies as st
from row_units import reduced
from tests.unit.runs.test_summary import Run
from torchmetrics.classification import MulticlassAccuracy
from units import RecordingRun

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.contributors import NEVER
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.memory import Row
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.job.topology import Topology
from dist_wandb.payloads.devices import HostCopy, Later
from dist_wandb.payloads.metrics import take_snapshot
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.summary import SummaryWrites
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import RunMode, plan_run
from dist_wandb.settings.reduction import (
    DEGRADED,
    EQUAL_BY_NATURE,
    Definitions,
    PerRank,
    Reduce,
    check_per_rank,
    check_reduce,
)


class Reduction:
    """A group of ranks in one thread: what each rank gives, then the result."""

    def __init__(self) -> None:
        self.given: list[tuple[Sequence[float], Sequence[float]]] = []
        self.is_known = False

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        if not self.is_known:
            self.given.append((sums, maxima))
        return reduced(self.given)


class Unit:
    """The ranks of a unit, each with a run if the mode gives it one."""

    def __init__(
        self,
        size: int = 2,
        *,
        run_mode: RunMode = "auto",
        reduce: Reduce = "auto",
        per_rank: PerRank = True,
        spread: Sequence[str] = (),
        step_metric: str | None = "global_step",
        axes: Sequence[str] = (),
        on_axis: Sequence[str] = (),
    ) -> None:
        self.runs = [RecordingRun() for _ in range(size)]
        self.protocol = row_units.Unit(size)
        self.rounds = self.protocol.machines
        self.ranks: list[Rows] = []
        given = {metric: {"step_metric": axes[0]} for metric in on_axis}
        definitions = Definitions(given=given, axes=dict.fromkeys(axes, 0))
        for rank, run in enumerate(self.runs):
            plan = plan_run(Topology(rank, rank, 0, size, size, 1), run_mode, "global", "base")
            opened: Any = run if plan.opens_run else NullRun()
            writer = RunWriter(opened, plan, step_metric)
            names, counts = check_per_rank(per_rank), step_metric == "global_step"
            arguments: dict[str, Any] = {"counts": counts, "rank": rank, "index": rank}
            self.ranks.append(Rows(writer, check_reduce(reduce), names, spread, lambda: definitions, **arguments))
        self.calls = [0] * size
        self.last: list[int | None] = [None] * size

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.runs[0].rows

    def log(
        self, rank: int, metrics: Mapping[str, Any], step: int | None = None, weight: Any = None, commit: Any = None
    ) -> None:
        self.last[rank] = self.last[rank] if step is None else step
        x = self.last[rank]
        contribution = Contribution(metrics, step, commit, weight, -1 - self.calls[rank] if x is None else x)
        self.calls[rank] += commit is not False
        self.ranks[rank].post(contribution, self.rounds[rank], self.protocol.now)

    def log_on_all(
        self, values: Sequence[Mapping[str, Any]], step: int | None = None, weight: Any = None, commit: Any = None
    ) -> None:
        """Log the values of each rank; a list has the weight of each."""
        for rank, metrics in enumerate(values):
            self.log(rank, metrics, step, weight[rank] if isinstance(weight, list) else weight, commit)

    def exchange(self, seconds: float = 1.0) -> bool:
        """Have a round after some time; return whether it was the last one."""
        self.protocol.now += seconds
        for machine, own in zip(self.rounds, self.ranks, strict=True):
            machine.side_data.axes = own.axes()
        self.protocol.exchange()
        outcomes = list(self.protocol.outcomes.values())
        for machine, own in zip(self.rounds, self.ranks, strict=True):
            own.spreads.keep(machine.outbox.last)
        spreads: Any = Reduction()
        for _ in range(2):
            for own, outcome in zip(self.ranks, outcomes, strict=True):
                own.spreads.exchange(own.spreads.due(outcome.rows), spreads)
            spreads.is_known = True
        for own, outcome in zip(self.ranks, outcomes, strict=True):
            own.writing.write(outcome.rows)
        return outcomes[0].closed

    def close(self) -> list[dict[str, Any]]:
        """Run rounds until nothing remains; return the primary's rows."""
        for machine in self.rounds:
            machine.intent = Intent.CLOSING
        while not self.exchange():
            pass
        for own in self.ranks:
            own.writing.end_row()
        return self.rows


def finished(values: Mapping[str, float], *, step: int | None = 0, x: int = 0, missing: int = 0) -> Row:
    lanes = lanes_of([number_of(value) for value in values.values()])
    return Row(tuple(values), (0,) * len(values), step, x, lanes, {}, (1,) * len(values), missing)


# --- calls of all ranks, and the rows that they become ----------------------------------------------------------------

THREE = Later(HostCopy([torch.tensor(3)]), 0)
AB = [{"a": 0.0, "b": -0.0}, {"a": 1.0, "b": -1.0}]
# By name: options, calls (the values of each rank, with step, weights and `commit`), rows of the primary and of rank 1.
ROWS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "the first pattern that matches": (
        {"reduce": {"tokens": "sum", "*_max": "max", "t*": "min"}},
        [([{"tokens": 3, "t_max": 5, "t": 0.5, "loss": 0.25}, {"tokens": 4, "t_max": 9, "t": 0.1, "loss": 0.5}], 7)],
        [{"tokens": 7, "t_max": 9, "t": 0.1, "loss": 0.375, "global_step": 7}],
        [],
    ),
    "first values and other objects alone": (
        {"reduce": "first"},
        [([{"text": "a", "lr": 0.5}, {"text": "b", "lr": 0.75}], 3), ([{"text": "c"}, {"text": "d"}], 4)],
        [{"text": "a", "lr": 0.5, "global_step": 3}, {"text": "c", "global_step": 4}],
        [],
    ),
    "own values whose numbers never arrive": (
        {"reduce": {"lr": "first"}},
        [([{"text": "a", "lr": 0.5, "loss": 1.0}], 3), ([{"text": "b", "loss": None}], 4)],
        [{"text": "a", "lr": 0.5, "loss": 1.0, "global_step": 3}, {"text": "b", "global_step": 4}],
        [],
    ),
    "one weight for all names": ({}, [(AB, 0, [3, 1])], [{"a": 0.25, "b": -0.25, "global_step": 0}], []),
    "equal numbers": ({}, [([{"loss": 0.1}] * 2, 0, [1, 2])], [{"loss": 0.1, "global_step": 0}], []),  # exactly
    "a weight on a device": ({}, [(AB, 0, [THREE, 1.0])], [{"a": 0.25, "b": -0.25, "global_step": 0}], []),
    "names without a weight": ({}, [(AB, 0, [{"a": 3}, {"a": 1}])], [{"a": 0.25, "b": -0.5, "global_step": 0}], []),
    "the weight of a NaN": (
        {"reduce": "nanmean"},
        [([{"loss": math.nan}, {"loss": 5.0}], 0, [100.0, 1.0])],
        [{"loss": 5.0, "global_step": 0}],
        [],
    ),
    "a rank with weight 0": (
        {},
        [([{"loss": 1.0}, {"loss": math.nan}], 0, [2, 0])],
        [{"loss": 1.0, "global_step": 0}],
        [],
    ),
    "weights of 0": ({"spread": ["*"]}, [(AB, 0, 0), (AB, 1, {"a": 0.0, "b": 0.0})], [], []),
    "weight 0 of a row with a text": (
        {},
        [([{"text": "a", "loss": 1.0}] * 2, 3, 0)],
        [{"text": "a", "global_step": 3}],
        [],
    ),
    "a name twice at a step": (
        {},
        [([{"loss": value, "text": f"at {value}"}] * 2, 0) for value in (1, 2)],
        [{"loss": value, "text": f"at {value}", "global_step": 0} for value in (1, 2)],
        [],
    ),
    "an equal value again at a step": (  # as in wandb: libraries log one metric a call, each with the epoch
        {},
        [
            *(([{name: 1.0, "epoch": 4.0, "phase": "train"}, {name: 2.0, "epoch": 4.0}], 0) for name in "abc"),
            ([{"d": 0.0, "epoch": 5.0}] * 2, 0),  # another value begins a row: none is lost
        ],
        [
            {"a": 1.5, "b": 1.5, "c": 1.5, "epoch": 4.0, "phase": "train", "global_step": 0},
            {"d": 0.0, "epoch": 5.0, "global_step": 0},
        ],
        [],
    ),
    "a call that is not committed": (
        {},
        [(AB, None, None, False), ([{"c": 1.0}] * 2,), ([{"d": 2.0}] * 2, 5, None, True), ([{"e": 3.0}] * 2, 5)],
        [
            {"a": 0.5, "b": -0.5, "c": 1.0, "global_step": 0},
            {"d": 2.0, "global_step": 5},
            {"e": 3.0, "global_step": 5},
        ],
        [],
    ),
    "an axis": (
        {"axes": ["epoch"]},
        [([{"loss": 1.0, "epoch": 2}, {"loss": 3.0, "epoch": 20}], 1), ([{"epoch": 7}, {"epoch": 8}], 3)],
        [{"loss": 2.0, "epoch": 2, "global_step": 1}, {"epoch": 7, "global_step": 3}],
        [],
    ),
    "an axis with a chosen reduction": (
        {"axes": ["samples"], "reduce": {"samples": "sum", "*": "mean"}},
        [([{"loss": 1.0, "samples": 10}, {"loss": 3.0, "samples": 20}], 0)],
        [{"loss": 2.0, "samples": 30, "global_step": 0}],
        [],
    ),
    "calls without a step": (
        {},
        [([{"text": "alone"}],), ([{"loss": 1.0}] * 2,), ([{"loss": 2.0}] * 2,)],
        [{"text": "alone", "global_step": 0}, {"loss": 1.0, "global_step": 1}, {"loss": 2.0, "global_step": 2}],
        [],
    ),
    "labels": (
        {"run_mode": "shared", "reduce": {"lr": "first", "*": "mean"}, "per_rank": ["loss", "text", "lr"]},
        [([{"loss": 1.0, "text": "a", "lr": 1.0, "more": [1]}, {"loss": 2.0, "text": "b", "lr": 2.0, "more": [1]}], 5)],
        [{"loss": 1.5, "rank-0/loss": 1.0, "text": "a", "lr": 1.0, "rank-0/lr": 1.0, "more": [1], "global_step": 5}],
        [{"rank-1/loss": 2.0, "rank-1/text": "b", "rank-1/lr": 2.0, "global_step": 5}],
    ),
    "labels without a step": (  # with the count of each rank
        {"run_mode": "shared"},
        [([{}, {"only here": 1.0}],), ([{"loss": 1.0}, {"loss": 2.0}],)],
        [{"loss": 1.5, "rank-0/loss": 1.0, "global_step": 1}, {"only here": 1.0, "global_step": 0}],
        [{"rank-1/only here": 1.0, "global_step": 0}, {"rank-1/loss": 2.0, "global_step": 1}],
    ),
    "no labels": (
        {"run_mode": "shared", "per_rank": False},
        [([{"loss": 1.0, "text": "a"}, {"loss": 1.0, "text": "b"}], 0)],
        [{"loss": 1.0, "text": "a", "global_step": 0}],
        [],
    ),
    **{
        f"before the first step, on {'another axis' if at else 'no axis'}": (
            {"run_mode": "shared", "per_rank": "loss", "step_metric": "trainer/global_step" if at else None},
            [([{"loss": 1.0, "text": "a"}, {"loss": 1.0}],), ([{"lr": 1.0}] * 2, 3)],
            [{"loss": 1.0, "rank-0/loss": 1.0, "text": "a", **at}, {"lr": 1.0, **dict.fromkeys(at, 3)}],
            [{"rank-1/loss": 1.0, **at}],
        )
        for at in ({"trainer/global_step": 0}, dict[str, int]())
    },
    "labels of None": (
        {"run_mode": "shared"},
        [([{"loss": None, "nobody": None}, {"loss": 3.0, "nobody": None}], 0)],
        [{"loss": 3.0, "global_step": 0}],
        [{"rank-1/loss": 3.0, "global_step": 0}],
    ),
    "labels on an axis": (
        {"run_mode": "shared", "axes": ["samples"]},
        [([{"loss": 1.0, "samples": 10}, {"loss": 2.0, "samples": 20}], 5)],
        [{"loss": 1.5, "rank-0/loss": 1.0, "samples": 10, "global_step": 5}],
        [{"rank-1/loss": 2.0, "samples": 20, "global_step": 5}],
    ),
    "labels on an axis that other calls have": (
        {"run_mode": "shared", "axes": ["samples"]},
        [
            *(([{"loss": 1.0}, {"loss": 2.0}], 5), ([{"samples": 10}, {"samples": 20}], 5)),
            *(([{"samples": 30}, {"samples": 40}], 6), ([{"loss": 5.0}, {"loss": 6.0}], 6)),
            *(([{"samples": 30}, {"samples": 40}], 6), ([{"samples": 50}, {"samples": 60}], 7)),
        ],
        [
            {"loss": 1.5, "rank-0/loss": 1.0, "samples": 10, "global_step": 5},
            {"loss": 5.5, "rank-0/loss": 5.0, "samples": 30, "global_step": 6},
            {"samples": 50, "global_step": 7},
        ],
        [
            {"rank-1/loss": 2.0, "samples": 20, "global_step": 5},
            {"rank-1/loss": 6.0, "samples": 40, "global_step": 6},
        ],
    ),
}


@pytest.mark.parametrize("is_at_once", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_calls_of_all_ranks_become_rows(name: str, is_at_once: bool) -> None:
    options, calls, rows, labelled = ROWS[name]
    unit = Unit(2, **options)
    for call in calls:
        unit.log_on_all(*call)
        for _ in range(0 if is_at_once else 3):
            unit.exchange()
    assert unit.close() == rows
    assert unit.runs[1].rows == labelled
    assert [rows.writes for rows in unit.ranks] == [True, False]


# --- reductions -------------------------------------------------------------------------------------------------------


NAN = float("nan")


@pytest.mark.parametrize(
    ("reduce", "values", "expected"),
    [
        ("nanmean", [1.0, NAN, 4.0], 2.5),
        ("nanmean", [NAN, NAN, -3.0], -3.0),
        ("nanmean", [2, NAN, 2], 2.0),
        ("nanmean", [1.0, None, 2.0], 1.5),
        ("nansum", [1.0, NAN, 4.0], 5.0),
        ("nansum", [NAN, None, NAN], 0.0),
        ("nansum", [1, 2, None], 3),
        ("nansum", [float("inf"), NAN, 1.0], float("inf")),
        ("mean", [1.0, None, 4.0], 2.5),
        ("sum", [None, None, 4], 4),
        ("max", [None, -1.0, None], -1.0),
        ("nanmean", [NAN] * 3, NAN),
        ("mean", [NAN] * 3, NAN),
        *((reduction, [1.0, NAN, 3.0], NAN) for reduction in ("mean", "sum", "min", "max")),
        *((reduction, [1.0, math.inf, 3.0], math.inf) for reduction in ("mean", "sum", "max")),
        ("min", [1.0, math.inf, 3.0], 1.0),
        ("mean", [math.inf, 1.0, -math.inf], NAN),
    ],
)
def test_ranks_without_a_number_are_left_out_but_nan_and_infinity_are_not(
    reduce: Any, values: list[float | None], expected: float
) -> None:
    unit = Unit(3, reduce={"loss": reduce})
    unit.log_on_all([{"loss": value, "other": 1.0} for value in values], 0)
    (row,) = unit.close()
    assert repr(row.pop("loss")) == repr(expected)  # by text: NaN is not equal to itself
    assert row == {"other": 1.0, "global_step": 0}


@pytest.mark.parametrize(
    ("reduce", "values", "expected"),
    [
        (None, [True, True], True),
        (None, [False, False], False),
        (None, [True, False], 0.5),
        ("max", [False, True], 1),
        ("min", [True, False], 0),
        ("sum", [True, False], 1),
        (None, [2**53 + 1] * 2, 2**53 + 1),
        (None, [-(2**60) - 1] * 2, -(2**60) - 1),
        ("sum", [2**53 + 1] * 2, float(2**54)),
        (None, [10**400] * 2, math.inf),
        ("max", [-(10**400)] * 2, -math.inf),
    ],
)
def test_booleans_and_large_integers_that_are_equal_stay_what_they_are(
    reduce: Any, values: list[int], expected: float
) -> None:
    """As in wandb, where `true` is not 1: rows can be filtered by it."""
    unit = Unit(2, reduce=reduce or "mean")
    unit.log_on_all([{"x": value} for value in values], 0)
    unit.log_on_all([{"x": value, "loss": 0.5} for value in values], 1)
    rows = unit.close()
    assert [(row["x"], type(row["x"])) for row in rows] == [(expected, type(expected))] * 2


def test_unused_patterns_are_kept_in_order() -> None:
    unit = Unit(reduce={"a": "sum", "loss": "min", "l*": "max", "b": "sum"})
    assert list(unit.ranks[0].reductions.unused) == ["a", "loss", "l*", "b"]
    unit.log(0, {"loss": 1.0}, 0)
    assert list(unit.ranks[0].reductions.unused) == ["a", "l*", "b"]


@pytest.mark.parametrize("axes", [(), ("epoch",)], ids=["x", "own axis"])
def test_a_position_that_is_logged_as_a_value_continues_the_open_row(axes: Sequence[str]) -> None:
    """``log({"text": ...}, commit=False)``, then ``log({"loss": ..., "global_step": 10})``: one row, as with wandb."""
    unit = Unit(axes=axes, on_axis=("mine",) if axes else ())
    for step in (10, 20):
        for rank in range(2):
            own = {axis: float(step) for axis in axes}
            calls = ({"text": "a", "mine": 1.0}, None, False), ({"loss": float(rank), **own}, step, True)
            for metrics, at, commit in calls:
                x = -1 if step == 10 else 10
                made = Contribution(metrics, at, commit, None, at or x, is_value=at is not None)
                unit.ranks[rank].post(made, unit.rounds[rank], unit.protocol.now)
    row = {"text": "a", "mine": 1.0, "loss": 0.5}
    assert unit.close() == [{**row, **dict.fromkeys(axes, step), "global_step": step} for step in (10, 20)]


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_an_invalid_weight_from_a_device_is_an_error_and_nothing_is_posted(value: float) -> None:
    unit = Unit()
    with pytest.raises(ConfigurationError, match=r"weight.* on rank 1 is negative or not finite"):
        unit.log(1, {"loss": 1.0}, 0, weight=Later(HostCopy([torch.tensor(value)]), 0))
    with pytest.raises(ConfigurationError, match=r"weight.* on rank 1 is negative or not finite"):
        unit.log(1, {"loss": 1.0}, 0, weight={"loss": Later(HostCopy([torch.tensor(value)]), 0)})
    assert not unit.rounds[1].outbox.waiting


# --- labels -----------------------------------------------------------------------------------------------------------


def test_values_equal_by_nature_are_not_labelled_by_default() -> None:
    equal = {name.replace("*", "AdamW/pg1"): 1.0 for name in EQUAL_BY_NATURE}
    equal |= {f"trainer/{name}": value for name, value in equal.items()}
    differ = {"loss": 1.0, "step_time": 1.0, "train/tokens_per_second": 1.0, "lrs": 1.0, "epochs/loss": 1.0}
    unit = Unit(run_mode="shared", per_rank="auto", step_metric=None)
    unit.log_on_all([{**equal, **differ, "note/epoch": "text"}] * 2, 0)
    assert set(unit.close()[0]) == {*equal, *differ, "note/epoch"} | {f"rank-0/{name}" for name in differ}
    assert set(unit.runs[1].rows[0]) == {f"rank-1/{name}" for name in (*differ, "note/epoch")}  # media are not affected


VALUES = {
    "loss": 1.0,
    "n.inner": 2,
    "epoch": 3,
    "text": "a",
    "vector": torch.ones(2),
    "media": wandb.Html("a", inject=False),
}


@pytest.mark.parametrize("rank", [0, 1], ids=["primary", "secondary"])
@pytest.mark.parametrize("per_rank", ["auto", True, False, "loss", ["n*", "text"], ["media", "vector"]])
def test_labels_are_the_same_with_and_without_reduction(rank: int, per_rank: PerRank) -> None:
    together, alone = (Unit(run_mode="shared", per_rank=per_rank) for _ in range(2))
    together.log_on_all([VALUES] * 2, 5)
    together.close()
    alone.ranks[rank].write_own(Contribution(VALUES, 5))
    rows = together.runs[rank].rows
    assert [set(row) for row in alone.runs[rank].rows] == [set(row) for row in rows]


@pytest.mark.parametrize("run_mode", ["auto", "shared", "new"])
def test_first_is_the_value_of_rank_0_in_all_modes(run_mode: RunMode) -> None:
    unit = Unit(3, run_mode=run_mode, reduce={"lr": "first"}, spread=["*"] if run_mode == "new" else (), per_rank=False)
    for step in range(2):
        unit.log_on_all([{"lr": 1 + rank, "loss": float(rank)} for rank in range(3)], step, weight=2)
    unit.close()
    for run in unit.runs[: None if run_mode == "new" else 1]:
        found = [(row["lr"], row["loss"]) for row in run.rows]
        assert found == [(1, 1.0)] * 2
        assert all(type(row["lr"]) is int and "lr/std" not in row for row in run.rows)


# --- the spread -------------------------------------------------------------------------------------------------------


def test_the_spread_has_min_max_std_and_argmax_rank() -> None:
    unit = Unit(4, spread=["loss"])
    unit.ranks[0].writing.global_rank_of = lambda index: 10 + index
    unit.log_on_all([{"loss": x, "lr": 0.1} for x in (2.0, 4.0, 9.0, 5.0)], 3)
    (row,) = unit.close()
    assert row == {
        "loss": 5.0,
        "loss/min": 2.0,
        "loss/max": 9.0,
        "loss/std": pytest.approx(math.sqrt((9 + 1 + 16 + 0) / 4)),  # of the population
        "loss/argmax_rank": 12,
        "lr": 0.1,
        "global_step": 3,
    }


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), st.sampled_from(["mean", "sum", "max"]))
def test_the_spread_is_weighted_like_the_mean_with_any_reduction(values: list[float], reduction: Any) -> None:
    unit = Unit(len(values), spread=["x"], reduce=reduction)
    for rank, value in enumerate(values):
        unit.log(rank, {"x": value}, 0, weight=rank + 1)
    (row,) = unit.close()
    weights = range(1, len(values) + 1)
    mean = math.fsum(map(operator.mul, weights, values)) / sum(weights)
    std = math.sqrt(math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) / sum(weights))
    assert row["x/std"] == pytest.approx(std, rel=1e-6, abs=1e-6)
    assert (row["x/min"], row["x/max"]) == (min(values), max(values))
    assert row["x/argmax_rank"] == values.index(max(values))


@pytest.mark.parametrize(
    ("values", "weights", "spread"),  # the mean, the least, the largest, the deviation and the rank
    [
        ([2**53 - 1] * 3, None, (2**53 - 1, 2**53 - 1, 2**53 - 1, 0.0, 0)),
        ([1.0, 1e160, 1.0], None, (pytest.approx(1e160 / 3), 1.0, 1e160, math.inf, 1)),
        ([1.0, 2.0, 100.0], [1, 2, 0], (pytest.approx(5 / 3), 1.0, 2.0, pytest.approx(math.sqrt(2) / 3), 1)),
        ([None, 1.0, 3.0], None, (2.0, 1.0, 3.0, 1.0, 2)),
        ([None, -2.0, math.nan], None, (-2.0, -2.0, -2.0, 0.0, 1)),
    ],
)
def test_the_spread_is_that_of_the_ranks_with_a_number(values: list[Any], weights: Any, spread: Any) -> None:
    unit = Unit(3, spread=["*"], reduce="nanmean")
    unit.log_on_all([{"x": value} for value in values], 0, weights)
    (row,) = unit.close()
    assert tuple(row[name] for name in ("x", "x/min", "x/max", "x/std", "x/argmax_rank")) == spread
    assert type(row["x/max"]) is type(values[spread[-1]])


# --- the content of a row ---------------------------------------------------------------------------------------------


def test_values_of_one_step_are_one_row_with_the_number_of_missing_ranks() -> None:
    """As in wandb: a call with a step leaves its row open for further values of this step."""
    unit = Unit(1)
    rows = [finished({"a": 1.0}, missing=3), finished({"b": 2.0}, missing=3), finished({"c": 3.0}, step=1, x=1)]
    unit.ranks[0].writing.write(rows)
    unit.ranks[0].writing.end_row()
    assert unit.rows == [{"a": 1.0, "b": 2.0, DEGRADED: 3, "global_step": 0}, {"c": 3.0, "global_step": 1}]
    assert DEGRADED == "dist_wandb/degraded"


@pytest.mark.parametrize("other", [0.5, "text"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_name_that_was_a_metric_begins_a_new_row(other: Any, is_first: bool) -> None:
    """Otherwise the row would have one of the two values."""
    unit, metric = Unit(), MulticlassAccuracy(4)
    metric.update(torch.arange(4), torch.arange(4))
    values = [take_snapshot(metric), other]
    for value in values if is_first else reversed(values):
        unit.log(0, {"accuracy": value}, 3)
    assert len(unit.rounds[0].outbox.waiting) == 2


def test_a_name_that_was_an_array_begins_a_new_row() -> None:
    """Arrays do not compare as a whole: the row was lost."""
    unit = Unit(2)
    for step, value in enumerate([torch.arange(2), 0.5, torch.arange(2), "text"]):
        unit.log_on_all([{"v": value, "k": 1.0}] * 2, step)
    assert [row["v"] for row in unit.close()[1::2]] == [0.5, "text"]


@pytest.mark.parametrize("adds", [0, 1])
@pytest.mark.parametrize("step", [None, 7])
def test_what_one_rank_adds_to_an_open_row_stands_in_it(adds: int, step: int | None) -> None:
    """Otherwise W&B fills in the last value of the user's axis, in that row and in those that it tears."""
    unit = Unit(axes=["epoch"])
    for number in range(6):
        at = None if step is None else number * step
        for rank in range(2):
            unit.log(rank, {"loss": float(rank)}, at, commit=False)
            if rank == adds:
                unit.log(rank, {"lr": number / 4, "note": "text"}, at, commit=False)
            unit.log(rank, {"acc": 1.0, "epoch": number * 10}, at, weight=1 + rank)
        unit.exchange()
    note = {"note": "text"} if adds == 0 else {}
    assert unit.close() == [
        {"loss": 0.5, "lr": number / 4, **note, "acc": 1.0, "epoch": number * 10, "global_step": number * (step or 1)}
        for number in range(6)
    ]


@pytest.mark.parametrize("is_apart", [False, True])
def test_own_values_of_calls_that_were_joined_stand_beside_their_numbers(is_apart: bool) -> None:
    """Threads log at one step: the calls of rank 1 wait together for rank 0, whose rows they become."""
    unit = Unit(run_mode="new", reduce="mean")
    for machine in unit.rounds:
        machine.side_data.interleaved = True
    calls: list[dict[str, Any]] = [{"a": 1.0}, {"b": 2.0, "note": "of b"}, {"c": 3.0, "text": "of c"}]
    for call in calls:
        unit.log(1, call, 0)
    for call in calls:
        unit.log(0, call, 0)
        if is_apart:
            unit.log(0, {"thread": 1.0}, 9)
    unit.close()
    rows = [{name for name in row if name not in ("global_step", "thread")} for row in unit.runs[1].rows]
    together = [{"a"}, {"b", "note"}, {"c", "text"}]
    assert [row for row in rows if row] == (together if is_apart else [set().union(*together)])


@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize(("rank", "added"), [(1, {"only": 1.0}), (0, {"note": "text"})])
def test_a_row_without_an_axis_gets_the_last_value_in_the_calls_of_its_rank(
    rank: int, added: dict[str, Any], step: int | None
) -> None:
    """W&B adds what was written last, and rows of later calls may be written before."""
    unit = Unit(axes=["epoch"], on_axis=["a", "only", "note"])
    unit.log_on_all([{"a": 1.0, "epoch": 3}] * 2, step)
    unit.log(rank, added, step and step + 1)
    unit.log_on_all([{"a": 2.0, "epoch": 4}] * 2, step and step + 2)
    unit.log_on_all([{"free": 1.0}] * 2, step and step + 3)
    rows = unit.close()
    assert [row["epoch"] for row in rows if row.keys() & added.keys()] == [3]
    assert [row["a"] for row in rows if row.get("epoch") == 4] == [2.0]
    assert [row.keys() for row in rows if "free" in row] == [{"free", "global_step"}]


def test_a_row_is_not_exchanged_before_the_script_has_ended_it() -> None:
    unit = Unit(axes=["epoch"])
    unit.log_on_all([{"loss": 0.0}, {"loss": 1.0}])
    unit.log(0, {"loss": 2.0}, commit=False)
    unit.log(0, {"epoch": 10})
    for part in ({"gpu": 5.0}, {"loss": 4.0}):
        unit.log(1, part, commit=False)
        unit.exchange(0.6)
    unit.log(1, {"epoch": 10})
    assert unit.close() == [
        {"loss": 0.5, "global_step": 0},
        {"loss": 3.0, "gpu": 5.0, "epoch": 10, "global_step": 1},
    ]


def test_a_call_that_ends_an_open_row_waits_for_its_new_name() -> None:
    """As a framework's row after ``log({"grad": ...}, commit=False)`` on one rank, some seconds later."""
    unit = Unit(step_metric="trainer/global_step")
    for step in range(3):
        if step == 1:
            unit.log(0, {"grad": 1.0}, commit=False)
            unit.exchange(30)
        for rank in range(2):
            unit.log(rank, {"loss": float(rank)}, step, commit=True)
        unit.exchange()
        unit.exchange()
    assert all("grad" not in row for row in unit.rows), "it still waits for the other rank"
    of_steps = [{"loss": 0.5, "trainer/global_step": step} for step in range(3)]
    assert unit.close() == [of_steps[0], of_steps[2], {"grad": 1.0, **of_steps[1]}]


def test_a_corrected_row_is_whole_but_for_the_primarys_own_values() -> None:
    unit = Unit()
    unit.log(0, {"loss": 1.0, "lr": 0.5, "text": "a"}, 0)
    for _ in range(3):
        unit.exchange()
    unit.rounds[0].gives_up = unit.rounds[0].table.round, NEVER
    unit.exchange()
    unit.log(1, {"loss": 3.0}, 0)
    assert unit.close() == [
        {"loss": 1.0, "lr": 0.5, "text": "a", "global_step": 0},
        {"loss": 2.0, "lr": 0.5, "global_step": 0},
    ]


def test_the_last_position_is_described_as_step_or_row() -> None:
    writing, found = Unit(1).ranks[0].writing, list[str]()
    for rows in ([], [finished({"a": 1.0}, step=7, x=7)], [finished({"a": 1.0}, step=None, x=-5)], []):
        writing.write(rows)
        found.append(writing.last_position)
    assert found == ["the start", "step 7", "row 5", "row 5"]


# --- places among the user's writes into the summary ------------------------------------------------------------------


def test_the_summary_has_the_last_row_of_a_rank_that_is_behind() -> None:
    """It logs rows alone before, while the other one's call for the last row has come already."""
    unit, run, summary = Unit(), Run(), SummaryWrites("global_step")
    summary.follow(run)  # type: ignore[arg-type]  # stands in for wandb's

    def keep(row: dict[str, Any], follows: Any, x: Any, **kwargs: Any) -> None:
        run.values.update({**row, "global_step": x} if row else {})
        summary.keep(row, follows, x, **kwargs)

    unit.ranks[0].keep_summary = keep
    unit.log(1, {"after": 1.0}, 9, commit=True)
    for row, step in (({"only": 1.0}, 8), ({"image": "a"}, 8), ({"after": 3.0}, 9)):
        unit.log(0, row, step, commit=True)
    unit.close()
    assert run.values == {"only": 1.0, "image": "a", "after": 2.0, "global_step": 9}


@pytest.mark.parametrize("commit", [None, True, False])
def test_a_row_of_one_rank_has_the_place_of_its_call(commit: Any) -> None:
    unit, places = Unit(run_mode="shared"), list[tuple[Any, ...]]()

    def keep(names: Iterable[str], *place: Any, is_open: bool, **_: Any) -> None:
        places.extend([([*names], *place, is_open)] if names else [])

    for rows in unit.ranks:
        rows.keep_summary = keep
    unit.ranks[0].write_own(Contribution({"loss": 1.0}, 4, commit, writes_before=2))
    under_label = Contribution({"loss": 1.0}, 4, commit, x=4, writes_before=3)
    unit.ranks[1].post(under_label, unit.rounds[1], unit.protocol.now)
    of_label = (["rank-1/loss"], 3, 4, not commit)
    assert places == [(["loss", "rank-0/loss"], 2, 4, commit is False), of_label]


def test_a_row_that_cannot_be_made_costs_no_other_row(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit()
    fails = iter([True, True])

    def act(_: int | None) -> None:
        if next(fails, False):
            raise ValueError("cannot be carried out")

    unit.ranks[0].act = act
    for step in range(4):
        unit.log_on_all([{"loss": 1.0}] * 2, step)
    assert [row["global_step"] for row in unit.close()] == [2, 3]
    assert unit.ranks[0].writer.lost == {"that W&B refused": 2}
    assert caplog.text.count("could not write a row") == 1
