"""From contributions to rows: ranks in one process, with rounds reduced by hand."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import wandb
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from dist_wandb.errors import ConfigurationError
from dist_wandb.exchange.protocol.calls import Intent
from dist_wandb.exchange.protocol.lanes import lanes_of, number_of
from dist_wandb.exchange.protocol.rounds import Rounds
from dist_wandb.exchange.protocol.table import Row
from dist_wandb.exchange.rows import Contribution, Rows
from dist_wandb.job.model import Topology
from dist_wandb.payloads.devices import HostCopy, Later
from dist_wandb.payloads.metrics import take_snapshot
from dist_wandb.runs.null_run import NullRun
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import RunMode, plan_run
from dist_wandb.settings.reduction import DEGRADED, EQUAL_BY_NATURE, PerRank, Reduce, check_per_rank, check_reduce


class Written:
    """A run that remembers its rows; those that are left open too, once the next one begins."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._open: dict[str, Any] = {}

    def log(self, row: dict[str, Any], commit: bool | None = None) -> None:
        self._open.update({name: value for name, value in row.items() if name != "_timestamp"})
        if commit is not False and self._open:
            self.rows.append(self._open)
            self._open = {}


class Reduction:
    """A group of ranks in one thread: what each rank gives, then the result."""

    def __init__(self) -> None:
        self.given: list[tuple[Sequence[float], Sequence[float]]] = []
        self.is_known = False

    def reduce(self, sums: Sequence[float], maxima: Sequence[float]) -> tuple[list[float], list[float]]:
        if not self.is_known:
            self.given.append((sums, maxima))
        return (
            [sum(column) for column in zip(*(lists[0] for lists in self.given), strict=True)],
            [max(column) for column in zip(*(lists[1] for lists in self.given), strict=True)],
        )


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
    ) -> None:
        self.runs = [Written() for _ in range(size)]
        self.rounds = [Rounds(rank, size) for rank in range(size)]
        self.ranks: list[Rows] = []
        for rank, run in enumerate(self.runs):
            plan = plan_run(Topology(rank, rank, 0, size, size, 1), run_mode, "global", "base")
            opened: Any = run if plan.opens_run else NullRun()
            writer = RunWriter(opened, plan, step_metric)
            names, counts = check_per_rank(per_rank), step_metric == "global_step"
            arguments: dict[str, Any] = {"counts": counts, "rank": rank, "index": rank}
            self.ranks.append(Rows(writer, check_reduce(reduce), names, spread, lambda: axes, **arguments))
        self.calls = [0] * size
        self.last: list[int | None] = [None] * size
        self.now = 0.0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the primary."""
        return self.runs[0].rows

    def log(
        self, rank: int, metrics: Mapping[str, Any], step: int | None = None, weight: Any = None, commit: Any = None
    ) -> list[str]:
        self.last[rank] = self.last[rank] if step is None else step
        x = self.last[rank]
        contribution = Contribution(metrics, step, commit, weight, -1 - self.calls[rank] if x is None else x)
        self.calls[rank] += commit is not False
        return list(self.ranks[rank].posting.post(contribution, self.rounds[rank], self.now))

    def log_on_all(self, values: Sequence[Mapping[str, Any]], step: int | None = None, weight: Any = None) -> None:
        for rank, metrics in enumerate(values):
            self.log(rank, metrics, step, weight)

    def exchange(self, seconds: float = 1.0) -> bool:
        """Have a round after some time; return whether it was the last one."""
        self.now += seconds
        offers: dict[bytes, frozenset[int]] = {}
        for rank, (machine, own) in enumerate(zip(self.rounds, self.ranks, strict=True)):
            machine.side_data.axes = own.axes()
            offer = machine.offer(self.now)
            offers[offer] = offers.get(offer, frozenset()) | {rank}
        have_numbers = [machine.plan(offers) for machine in self.rounds]
        group = Reduction()
        lists = [group.reduce(*machine.pack()) for machine in self.rounds][-1] if have_numbers[0] else ([], [])
        outcomes = [machine.unpack(*lists) for machine in self.rounds]
        for machine, own in zip(self.rounds, self.ranks, strict=True):
            own.spreads.keep(machine.outbox.last)
            own.attachments.settle(machine.outbox, machine.table.names)
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


# --- reductions -------------------------------------------------------------------------------------------------------


def test_numbers_are_reduced_by_the_first_pattern_that_matches() -> None:
    unit = Unit(reduce={"tokens": "sum", "*_max": "max", "t*": "min", "*": "mean"})
    metrics = [
        {"tokens": 3, "t_max": 5, "time": 0.5, "loss": 0.25},
        {"tokens": 4, "t_max": 9, "time": 0.1, "loss": 0.5},
    ]
    unit.log_on_all(metrics, step=7)
    assert unit.close() == [{"tokens": 7, "t_max": 9, "time": 0.1, "loss": 0.375, "global_step": 7}]


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
    ],
)
def test_ranks_without_a_number_are_left_out(reduce: Any, values: list[float | None], expected: float) -> None:
    unit = Unit(3, reduce={"loss": reduce})
    unit.log_on_all([{"loss": value, "other": 1.0} for value in values], 0)
    (row,) = unit.close()
    assert row == {"loss": expected, "other": 1.0, "global_step": 0}
    assert type(row["loss"]) is type(expected)


@pytest.mark.parametrize("reduce", ["nanmean", "mean"])
def test_the_mean_is_nan_if_all_ranks_have_nan(reduce: Any) -> None:
    unit = Unit(2, reduce=reduce)
    unit.log_on_all([{"loss": NAN}] * 2, 0)
    assert math.isnan(unit.close()[0]["loss"])


def test_a_name_that_is_none_on_all_ranks_is_not_in_the_row() -> None:
    unit = Unit(2)
    unit.log_on_all([{"loss": None, "other": 1.0}] * 2, 0)
    assert unit.close() == [{"other": 1.0, "global_step": 0}]


def test_none_values_have_no_label() -> None:
    unit = Unit(2, run_mode="shared")
    unit.log_on_all([{"loss": None}, {"loss": 3.0}], 0)
    assert unit.close() == [{"loss": 3.0, "global_step": 0}]
    assert unit.runs[1].rows == [{"rank-1/loss": 3.0, "global_step": 0}]


def test_nanmean_ignores_the_weight_of_a_nan() -> None:
    unit = Unit(3, reduce="nanmean")
    for rank, (value, weight) in enumerate([(1.0, 3.0), (NAN, 100.0), (5.0, 1.0)]):
        unit.log(rank, {"loss": value}, 0, weight)
    assert unit.close() == [{"loss": 2.0, "global_step": 0}]


def test_a_name_without_a_matching_pattern_is_averaged() -> None:
    unit = Unit(reduce={"tokens": "sum"})
    unit.log_on_all([{"loss": 1.0}, {"loss": 2.0}], 0)
    assert unit.close() == [{"loss": 1.5, "global_step": 0}]


def test_unused_patterns_are_kept_in_order() -> None:
    unit = Unit(reduce={"a": "sum", "loss": "min", "l*": "max", "b": "sum"})
    assert list(unit.ranks[0].reductions.unused) == ["a", "loss", "l*", "b"]
    unit.log(0, {"loss": 1.0}, 0)
    assert list(unit.ranks[0].reductions.unused) == ["a", "l*", "b"]


def test_first_values_and_other_objects_are_written_in_the_primarys_row() -> None:
    unit = Unit(reduce={"lr": "first", "*": "mean"})
    posted = [unit.log(rank, {"text": f"of {rank}", "lr": rank + 0.5, "loss": rank}, 3) for rank in range(2)]
    assert posted == [["loss"], ["loss"]]
    assert unit.rows == []
    assert unit.close() == [{"text": "of 0", "lr": 0.5, "loss": 0.5, "global_step": 3}]


def test_first_values_and_other_objects_alone_are_rows() -> None:
    unit = Unit(reduce="first")
    unit.log_on_all([{"text": "a", "lr": 0.5}, {"text": "b", "lr": 0.75}], 3)
    unit.log_on_all([{"text": "c"}, {"text": "d"}], 4)
    unit.exchange()
    assert unit.rows == [{"text": "a", "lr": 0.5, "global_step": 3}]
    assert unit.close() == [{"text": "a", "lr": 0.5, "global_step": 3}, {"text": "c", "global_step": 4}]


def test_first_values_and_other_objects_wait_for_the_numbers_of_their_row() -> None:
    unit = Unit()
    unit.log(0, {"text": "a", "loss": 1.0}, 0)
    unit.exchange()
    unit.exchange()
    assert unit.rows == []
    unit.log(1, {"loss": 2.0}, 0)
    assert unit.close() == [{"text": "a", "loss": 1.5, "global_step": 0}]


def test_posting_waits_for_numbers_that_are_being_copied() -> None:
    unit = Unit()
    copy = HostCopy([torch.tensor(1.0), torch.tensor(3.0)])
    for rank in range(2):
        unit.log(rank, {"loss": Later(copy, rank)}, 0, weight={"loss": Later(copy, rank)})
    assert unit.close() == [{"loss": 2.5, "global_step": 0}]


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(3, 1), (Later(HostCopy([torch.tensor(3)]), 0), 1.0)], ids=["numbers", "later"])
def test_one_weight_applies_to_all_names(weights: tuple[Any, Any]) -> None:
    unit = Unit()
    for rank, weight in enumerate(weights):
        unit.log(rank, {"a": float(rank), "b": float(-rank)}, 0, weight)
    assert unit.close() == [{"a": 0.25, "b": -0.25, "global_step": 0}]


def test_names_without_a_weight_have_weight_1() -> None:
    unit = Unit()
    for rank, weight in enumerate((3, 1)):
        unit.log(rank, {"a": float(rank), "b": float(rank)}, 0, {"a": weight})
    assert unit.close() == [{"a": 0.25, "b": 0.5, "global_step": 0}]


def test_a_rank_with_weight_0_is_left_out() -> None:
    unit = Unit()
    unit.log(0, {"loss": 1.0}, 0, weight=2)
    unit.log(1, {"loss": math.nan}, 0, weight=0)
    assert unit.close() == [{"loss": 1.0, "global_step": 0}]


def test_nothing_is_written_if_all_weights_are_0() -> None:
    unit = Unit(spread=["*"])
    unit.log_on_all([{"loss": 1.0}, {"loss": 2.0}], 0, weight=0)
    unit.log_on_all([{"loss": 1.0}, {"loss": 2.0}], 1, weight={"loss": 0.0})
    assert unit.close() == []


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_an_invalid_weight_from_a_device_is_an_error_and_nothing_is_posted(value: float) -> None:
    unit = Unit()
    with pytest.raises(ConfigurationError, match=r"weight.* on rank 1 is negative or not finite"):
        unit.log(1, {"loss": 1.0}, 0, weight=Later(HostCopy([torch.tensor(value)]), 0))
    with pytest.raises(ConfigurationError, match=r"weight.* on rank 1 is negative or not finite"):
        unit.log(1, {"loss": 1.0}, 0, weight={"loss": Later(HostCopy([torch.tensor(value)]), 0)})
    assert not unit.rounds[1].outbox.waiting


# --- labels -----------------------------------------------------------------------------------------------------------


def test_each_rank_of_a_shared_run_writes_its_numbers_under_its_label() -> None:
    unit = Unit(run_mode="shared")
    unit.log_on_all([{"loss": 1.0, "text": "a"}, {"loss": 2.0, "text": "b"}], 5)
    assert unit.runs[1].rows == [{"rank-1/text": "b", "rank-1/loss": 2.0, "global_step": 5}]  # at once
    assert unit.close() == [{"loss": 1.5, "rank-0/loss": 1.0, "text": "a", "global_step": 5}]  # one row
    assert len(unit.runs[1].rows) == 1


def test_labelled_rows_without_a_step_use_the_ranks_own_count() -> None:
    unit = Unit(run_mode="shared")
    unit.log(1, {"only here": 1.0})
    unit.log_on_all([{"loss": 1.0}, {"loss": 2.0}])
    assert unit.runs[1].rows[-1] == {"rank-1/loss": 2.0, "global_step": 1}
    assert {"loss": 1.5, "rank-0/loss": 1.0, "global_step": 0} in unit.close()


def test_first_values_are_labelled_too() -> None:
    unit = Unit(run_mode="shared", reduce="first")
    unit.log_on_all([{"lr": 1.0}, {"lr": 2.0}], 5)
    assert unit.close() == [{"lr": 1.0, "rank-0/lr": 1.0, "global_step": 5}]
    assert unit.runs[1].rows == [{"rank-1/lr": 2.0, "global_step": 5}]


@pytest.mark.parametrize(
    ("per_rank", "labelled"),
    [(True, {"loss", "lr"}), (False, set()), ("lo*", {"loss"}), (["lr", "x"], {"lr"}), ("LOSS", set())],
)
def test_patterns_select_the_labelled_names(per_rank: PerRank, labelled: set[str]) -> None:
    unit = Unit(run_mode="shared", per_rank=per_rank)
    unit.log_on_all([{"loss": 1.0, "lr": 0.5}] * 2, 0)
    assert set(unit.close()[0]) == {"loss", "lr", "global_step"} | {f"rank-0/{name}" for name in labelled}
    assert [set(row) for row in unit.runs[1].rows] == (
        [{"global_step"} | {f"rank-1/{name}" for name in labelled}] if labelled else []
    )


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
    alone.ranks[rank].posting.write_own(Contribution(VALUES, 5))
    rows = together.runs[rank].rows
    assert [set(row) for row in alone.runs[rank].rows] == [set(row) for row in rows]


def test_the_x_axis_has_no_label() -> None:
    unit = Unit(run_mode="shared")
    for rank in range(2):
        unit.ranks[rank].posting.write_own(Contribution({"loss": 0.5, "global_step": 3}, None))
    assert unit.rows == [{"loss": 0.5, "rank-0/loss": 0.5, "global_step": 3}]
    assert unit.runs[1].rows == [{"rank-1/loss": 0.5, "global_step": 3}]


def test_objects_other_than_numbers_are_labelled_on_secondary_ranks() -> None:
    unit = Unit(run_mode="shared", reduce={"lr": "first", "*": "mean"}, per_rank=["loss", "text", "lr"])
    unit.log_on_all([{"loss": 1.0, "text": "a", "lr": 1.0, "more": [1]}] * 2, 5)
    own = {"rank-1/loss": 1.0, "rank-1/text": "a", "rank-1/lr": 1.0, "global_step": 5}
    assert unit.runs[1].rows == [own]
    plain = {"loss": 1.0, "text": "a", "lr": 1.0, "more": [1]}
    assert unit.close() == [{**plain, "rank-0/loss": 1.0, "rank-0/lr": 1.0, "global_step": 5}]


@pytest.mark.parametrize("run_mode", ["auto", "new"])
def test_other_modes_have_no_labels(run_mode: RunMode) -> None:
    unit = Unit(run_mode=run_mode)
    unit.log_on_all([{"loss": 1.0}, {"loss": 2.0}], 0)
    assert unit.close() == [{"loss": 1.5, "global_step": 0}]


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


def test_equal_integers_have_zero_spread_at_the_lowest_rank() -> None:
    unit = Unit(3, spread=["*"])
    unit.log_on_all([{"n": 2**53 - 1}] * 3, 0)
    (row,) = unit.close()
    assert (row["n/min"], row["n/max"], row["n/std"], row["n/argmax_rank"]) == (2**53 - 1, 2**53 - 1, 0.0, 0)
    assert type(row["n/max"]) is int


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


def test_ranks_with_weight_0_are_left_out_of_the_spread() -> None:
    unit = Unit(3, spread=["x"])
    for rank, (value, weight) in enumerate([(1.0, 1), (2.0, 2), (100.0, 0)]):
        unit.log(rank, {"x": value}, 0, weight=weight)
    (row,) = unit.close()
    assert row["x"] == pytest.approx(5 / 3)
    assert row["x/std"] == pytest.approx(math.sqrt(2) / 3)  # of 1, 2 and 2
    assert (row["x/min"], row["x/max"], row["x/argmax_rank"]) == (1.0, 2.0, 1)


@pytest.mark.parametrize("without_part", [None, math.nan])
def test_argmax_rank_ignores_ranks_without_a_number(without_part: float | None) -> None:
    unit = Unit(2, spread=["x"], reduce="nanmean")
    unit.log_on_all([{"x": without_part}, {"x": -math.inf}], 0)
    (row,) = unit.close()
    assert (row["x"], row["x/max"], row["x/argmax_rank"]) == (-math.inf, -math.inf, 1)


def test_the_spread_covers_only_contributing_ranks() -> None:
    unit = Unit(3, spread=["x"])
    unit.log(1, {"x": 1.0}, 0)
    unit.log(2, {"x": 3.0}, 0)
    (row,) = unit.close()
    assert (row["x"], row["x/std"], row["x/argmax_rank"]) == (2.0, 1.0, 2)


# --- the content of a row ---------------------------------------------------------------------------------------------


def test_values_of_one_step_are_one_row() -> None:
    """As in wandb: a call with a step leaves its row open for further values of this step."""
    unit = Unit(1)
    unit.ranks[0].writing.write([finished({"a": 1.0}), finished({"b": 2.0}), finished({"c": 3.0}, step=1, x=1)])
    unit.ranks[0].writing.end_row()
    assert unit.rows == [{"a": 1.0, "b": 2.0, "global_step": 0}, {"c": 3.0, "global_step": 1}]


def test_a_row_left_open_is_ended_after_some_time() -> None:
    unit = Unit(1)
    unit.ranks[0].writing.write([finished({"a": 1.0})])
    unit.ranks[0].writing.end_row(time.monotonic())
    assert unit.rows == []
    unit.ranks[0].writing.end_row(time.monotonic() + 5.0)
    assert unit.rows == [{"a": 1.0, "global_step": 0}]


def test_a_name_logged_twice_at_a_step_gives_two_rows_in_order() -> None:
    unit = Unit()
    for value in (1.0, 2.0):
        unit.log_on_all([{"loss": value, "text": f"at {value}"}] * 2, 0)
    assert unit.close() == [
        {"loss": 1.0, "text": "at 1.0", "global_step": 0},
        {"loss": 2.0, "text": "at 2.0", "global_step": 0},
    ]


def test_a_call_that_is_not_committed_is_continued_by_the_next_one() -> None:
    unit = Unit()
    for rank in range(2):
        unit.log(rank, {"a": float(rank)}, commit=False)
        unit.log(rank, {"b": float(rank)})
        unit.log(rank, {"c": float(rank)}, 5, commit=True)
        unit.log(rank, {"d": float(rank)}, 5)
    assert unit.close() == [
        {"a": 0.5, "b": 0.5, "global_step": 0},
        {"c": 0.5, "global_step": 5},
        {"d": 0.5, "global_step": 5},
    ]


def test_text_of_an_open_row_waits_for_the_numbers_of_a_rank_that_is_behind() -> None:
    unit = Unit()
    unit.log_on_all([{"a": 1.0}] * 2)
    for rank in range(2):
        for _ in range(3):
            unit.exchange()
        unit.log(rank, {"a": 1.0 + rank}, commit=False)
        unit.log(rank, {"note": f"rank {rank}"})
    assert unit.close() == [{"a": 1.0, "global_step": 0}, {"a": 1.5, "note": "rank 0", "global_step": 1}]


def test_a_row_has_the_axis_of_its_owners_call() -> None:
    unit = Unit(axes=["epoch"])
    for step in range(3):
        unit.log_on_all([{"loss": 1.0, "epoch": step}, {"loss": 3.0, "epoch": 10 * step}], step)
    unit.log_on_all([{"epoch": 7}, {"epoch": 8}], 3)
    expected = [{"loss": 2.0, "epoch": step, "global_step": step} for step in range(3)]
    assert unit.close() == [*expected, {"epoch": 7, "global_step": 3}]


def test_an_axis_with_a_chosen_reduction_is_reduced() -> None:
    unit = Unit(axes=["samples"], reduce={"samples": "sum", "*": "mean"})
    unit.log_on_all([{"loss": 1.0, "samples": 10}, {"loss": 3.0, "samples": 20}], 0)
    assert unit.close() == [{"loss": 2.0, "samples": 30, "global_step": 0}]


def test_labelled_rows_have_the_axis_of_their_call() -> None:
    unit = Unit(run_mode="shared", axes=["samples"])
    unit.log_on_all([{"loss": 1.0, "samples": 10}, {"loss": 2.0, "samples": 20}], 5)
    assert unit.runs[1].rows == [{"rank-1/loss": 2.0, "samples": 20, "global_step": 5}]
    assert unit.close() == [{"loss": 1.5, "rank-0/loss": 1.0, "samples": 10, "global_step": 5}]


def test_a_row_is_flagged_with_the_number_of_missing_ranks() -> None:
    unit = Unit(1)
    unit.ranks[0].writing.write([finished({"a": 1.0, "b": 2.0}, missing=3), finished({"d": 4.0}, step=1, x=1)])
    unit.ranks[0].writing.end_row()
    assert unit.rows == [{"a": 1.0, "b": 2.0, DEGRADED: 3, "global_step": 0}, {"d": 4.0, "global_step": 1}]
    assert DEGRADED == "dist_wandb/degraded"


def test_rows_without_a_step_use_the_call_count() -> None:
    unit = Unit()
    unit.log(0, {"text": "alone"})
    for value in (1.0, 2.0):
        unit.log_on_all([{"loss": value}] * 2)
    assert unit.close() == [
        {"text": "alone", "global_step": 0},
        {"loss": 1.0, "global_step": 1},
        {"loss": 2.0, "global_step": 2},
    ]


def test_calls_without_a_step_are_separate_rows_whenever_they_are_exchanged() -> None:
    at_once, one_by_one = Unit(), Unit()
    for unit in (at_once, one_by_one):
        for name in ("loss", "accuracy", "loss"):
            unit.log_on_all([{name: 1.0}, {name: 1.0}])
            if unit is one_by_one:
                for _ in range(3):
                    unit.exchange()
    expected = [
        {"loss": 1.0, "global_step": 0},
        {"accuracy": 1.0, "global_step": 1},
        {"loss": 1.0, "global_step": 2},
    ]
    assert one_by_one.close() == expected
    assert at_once.close() == expected


@pytest.mark.parametrize("step_metric", ["trainer/global_step", None])
def test_on_another_axis_rows_before_the_first_step_lie_at_0(step_metric: str | None) -> None:
    unit = Unit(step_metric=step_metric, run_mode="shared", per_rank="loss")
    unit.log_on_all([{"loss": 1.0, "text": "a"}, {"loss": 1.0}])
    unit.log_on_all([{"lr": 1.0}, {"lr": 1.0}], 3)
    first, axis = ({step_metric: 0}, {step_metric: 3}) if step_metric else ({}, {})
    assert unit.runs[1].rows == [{"rank-1/loss": 1.0, **first}]
    assert unit.close() == [{"loss": 1.0, "rank-0/loss": 1.0, "text": "a", **first}, {"lr": 1.0, **axis}]


def test_a_secondary_writes_no_finished_values() -> None:
    unit = Unit(run_mode="shared", per_rank=False)
    unit.log_on_all([{"loss": 1.0, "text": "a"}, {"loss": 1.0, "text": "b"}], 0)
    unit.close()
    assert unit.runs[1].rows == []
    assert [rows.writes for rows in unit.ranks] == [True, False]


def test_a_corrected_row_is_whole_but_for_the_primarys_own_values() -> None:
    unit = Unit()
    unit.log(0, {"loss": 1.0, "lr": 0.5, "text": "a"}, 0)
    for _ in range(3):
        unit.exchange()
    unit.rounds[0].give_up(new=unit.rounds[0].table.round)
    unit.exchange()
    unit.log(1, {"loss": 3.0}, 0)
    assert unit.close() == [
        {"loss": 1.0, "lr": 0.5, "text": "a", "global_step": 0},
        {"loss": 2.0, "lr": 0.5, "global_step": 0},
    ]


def test_the_last_position_is_described_as_step_or_row() -> None:
    unit = Unit(1)
    rows = unit.ranks[0]
    assert rows.writing.last_position == "the start"
    rows.writing.write([finished({"a": 1.0}, step=7, x=7)])
    assert rows.writing.last_position == "step 7"
    rows.writing.write([finished({"a": 1.0}, step=None, x=-5)])
    assert rows.writing.last_position == "row 5"
    rows.writing.write([])
    assert rows.writing.last_position == "row 5"


# --- the end ----------------------------------------------------------------------------------------------------------


def test_own_values_whose_numbers_never_arrive_are_written_at_the_end() -> None:
    unit = Unit(reduce={"lr": "first"})
    unit.log(0, {"text": "a", "lr": 0.5, "loss": 1.0}, 3)
    unit.exchange()
    unit.log(0, {"text": "b", "loss": None}, 4)
    assert unit.close() == [
        {"text": "a", "lr": 0.5, "loss": 1.0, "global_step": 3},
        {"text": "b", "global_step": 4},
    ]


def test_weight_0_on_all_ranks_keeps_objects_other_than_numbers() -> None:
    unit = Unit()
    unit.log_on_all([{"text": "a", "loss": 1.0}] * 2, 3, weight=0)
    assert unit.close() == [{"text": "a", "global_step": 3}]


# --- without other ranks ----------------------------------------------------------------------------------------------


def test_write_own_writes_a_contribution_unchanged() -> None:
    unit = Unit(1)
    unit.ranks[0].posting.write_own(Contribution({"loss": 1.0, "text": "a"}, 3))
    unit.ranks[0].posting.write_own(Contribution({"loss": 2.0}, None))
    assert unit.rows == [{"loss": 1.0, "text": "a", "global_step": 3}, {"loss": 2.0}]


def test_text_stays_in_the_row_of_a_metric_that_adopts_another_layout() -> None:
    """Adopting a layout renames the cell; the row's text once stayed under the old name until the end."""
    unit = Unit(run_mode="new", reduce="mean")
    metrics = [MetricCollection({name: MulticlassAccuracy(4) for name in "ab"}) for _ in unit.ranks]
    metrics[1].update(torch.arange(4), torch.arange(4))  # which shows that both have the same states
    for rank, metric in enumerate(metrics):
        unit.log(rank, {"accuracy": take_snapshot(metric), "text": f"of rank {rank}"}, 3)
    unit.close()
    assert [run.rows for run in unit.runs] == [[{"text": f"of rank {rank}", "global_step": 3}] for rank in range(2)]
