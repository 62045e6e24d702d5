"""The rows that a writer writes."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from fakes import FakeWandb
from limits import Limit
from opened_runs import FIRST, SECOND, opened

from dist_wandb.job.topology import Topology
from dist_wandb.runs import writer
from dist_wandb.runs.definitions import define_step_metric
from dist_wandb.runs.writer import RunWriter
from dist_wandb.settings.plan import RunPlan, plan_run

pytestmark = pytest.mark.usefixtures("bare_environment")


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def log(self, row: dict[str, Any], **kwargs: Any) -> None:
        self.calls.append((row, kwargs))


def plan_of(topology: Topology, mode: str) -> RunPlan:
    return plan_run(topology, mode, "global", "exp")


PLAIN = plan_of(FIRST, "new")


# --- open rows --------------------------------------------------------------------------------------------------------


def rows_of(*calls: tuple[dict[str, Any], int | None, bool | None]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    run: Any = Recorder()
    rows = RunWriter(run, PLAIN, "global_step")
    for metrics, step, commit in calls:
        rows.write(metrics, step, commit=commit)
    rows.write({}, None)
    return run.calls  # type: ignore[no-any-return]  # a Recorder


def without_time(calls: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "_timestamp"} for row, _ in calls]


def test_calls_at_one_step_are_one_row_until_another_step_or_a_commit() -> None:
    calls = rows_of(
        ({"a": 1}, 2, False), ({"b": 2}, 4, False), ({"n": 11}, 5, False), ({"n": 12}, 6, False), ({"n": 13}, 6, False)
    )
    assert without_time(calls) == [
        {"a": 1, "global_step": 2},
        {"b": 2, "global_step": 4},
        {"n": 11, "global_step": 5},
        {"n": 13, "global_step": 6},
    ]
    assert without_time(rows_of(({"a": 1}, 2, False), ({"b": 2}, 2, True), ({"c": 3}, 2, None))) == [
        {"a": 1, "b": 2, "global_step": 2},
        {"c": 3, "global_step": 2},
    ]
    named = {"a": 1, "global_step": 2.5}
    assert without_time(rows_of((named, 7, None))) == [named], "as in wandb, what the script logs under the axis' name"
    for more in ([({"b": 2}, 7, False)], [({"b": 2}, 7, False), ({"c": 3}, None, True)]):
        rows = without_time(rows_of((named, 7, False), *more))
        assert rows == [{**named, **{name: value for row, *_ in more for name, value in row.items()}}]


def test_a_call_without_a_step_adds_to_the_open_row() -> None:
    assert without_time(rows_of(({"a": 1}, 2, False), ({"b": 2}, None, False), ({"c": 3}, None, True))) == [
        {"a": 1, "b": 2, "c": 3, "global_step": 2}
    ]
    row = {"a": 1, "global_step": 5}
    assert without_time(rows_of((row, None, False), ({"b": 2}, 5, True))) == [{**row, "b": 2}]
    assert without_time(rows_of((row, None, False), ({"b": 2}, 6, True))) == [row, {"b": 2, "global_step": 6}]
    for x in (6, 6.5):  # what the script logs under the axis' name is a value of the row, as in wandb
        other = {"b": 2, "global_step": x}
        assert without_time(rows_of(({"a": 1}, 5, False), (other, None, True))) == [{"a": 1, **other}]


def test_an_open_row_without_a_position_joins_the_row_that_ends_it() -> None:
    assert without_time(rows_of(({"a": 1}, None, False), ({"b": 2}, 9, True))) == [{"a": 1, "b": 2, "global_step": 9}]
    assert without_time(rows_of(({"a": 1}, None, False), ({"b": 2}, 9, False))) == [
        {"a": 1},
        {"b": 2, "global_step": 9},
    ]


def test_values_that_may_change_are_passed_to_wandb_at_once() -> None:
    table = object()
    calls = rows_of(({"a": 1}, 2, False), ({"table": table}, 2, False), ({"b": 2}, 2, False), ({"c": 3}, 3, False))
    assert list(zip(without_time(calls), [kwargs for _, kwargs in calls], strict=True)) == [
        ({"a": 1, "table": table, "global_step": 2}, {"commit": False}),
        ({"b": 2, "global_step": 2}, {}),
        ({"c": 3, "global_step": 3}, {}),
    ]


@pytest.mark.parametrize("commit", [False, True])
def test_wandb_gets_each_value_of_a_name_that_becomes_a_mapping_again(commit: bool) -> None:
    """W&B adds a mapping to an earlier one of its row, unless another value of the name came between."""
    calls = rows_of(({"a": {"b": 1}}, 2, False), ({"a": 5}, 2, False), ({"a": {"c": 2}}, 2, commit))
    assert [row["a"] for row in without_time(calls) if "a" in row] == [{"b": 1}, 5, {"c": 2}]


def test_an_open_row_has_the_time_of_its_last_call() -> None:
    run = Recorder()
    rows = RunWriter(run, PLAIN, "global_step")  # type: ignore[arg-type]  # a Recorder
    rows.write({"a": 1}, 2, commit=False)
    before = time.time()
    rows.write({"b": 2}, 2, commit=False)
    after = time.time()
    rows.write({"c": 3}, 3, commit=False)
    rows.write({"d": 4}, 3, commit=True)
    (first, _), (second, _) = run.calls
    assert before <= first["_timestamp"] <= after
    assert "_timestamp" not in second  # a row that is written at once needs none


def test_a_thread_waits_for_another_only_for_a_limited_time(limit: Limit) -> None:
    limit(writer, _LONGEST_TURN=0.05)
    goes_on, is_in, run = threading.Event(), threading.Event(), Recorder()
    log = run.log

    def stalls(row: dict[str, Any], **kwargs: Any) -> None:
        if "first" in row:
            is_in.set()
            assert goes_on.wait(60)
        log(row, **kwargs)

    run.log = stalls  # type: ignore[method-assign]
    rows = RunWriter(run, PLAIN, "global_step")  # type: ignore[arg-type]  # a Recorder
    thread = threading.Thread(target=lambda: rows.write({"first": 1}, 1))
    thread.start()
    assert is_in.wait(60)
    rows.write({"second": 2}, 2)
    goes_on.set()
    thread.join(60)
    assert [row["global_step"] for row, _ in run.calls] == [2, 1]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_every_writer_defines_the_same_x_axis(fake_wandb: FakeWandb) -> None:
    for topology in (FIRST, SECOND):
        define_step_metric(opened(topology, "shared", {}), "global_step")
    assert [run.defined for run in fake_wandb.runs] == [
        [("global_step", {}), ("*", {"step_metric": "global_step", "step_sync": False})]
    ] * 2
