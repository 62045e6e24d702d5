"""The judge sees what differs between two runs: each planted difference is found, and intended ones are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracle.comparing import DEGRADED, Terms, compare
from oracle.recorded import Recorded

ROWS: list[dict[str, Any]] = [
    {"loss": 0.5, "lr": 0.1, "samples": 0},
    {"loss": 0.25, "samples": 32, "val.acc": 0.75},
    {"loss": 0.125, "lr": 0.01, "samples": 64, "note": "text", "ok": True},
    {"gpu": 7, "samples": 64},
]


def of_stock() -> Recorded:
    """Return a run of stock wandb."""
    return Recorded(
        rows=[{**row, "_step": step, "_runtime": 0.1, "_timestamp": 1.0} for step, row in enumerate(ROWS)],
        summary={"loss": 0.125, "val.acc": 0.75, "best": 1, "_step": 3, "_wandb.runtime": 0},
        config={"lr": 0.1, "_wandb": {}},
        axes={"samples": "", "val*": "samples"},
        exit_code=0,
    )


def of_ours() -> Recorded:
    """Return the same run by this package, with all differences that are intended."""
    stock = of_stock()
    return Recorded(
        rows=[{**row, "_step": 5 + step, "global_step": step} for step, row in enumerate(ROWS)],
        summary={**stock.summary, "_step": 7, "global_step": 3},
        config={"lr": 0.1, "_wandb": {"m": []}},
        axes={"global_step": "", "*": "global_step", **stock.axes},
        exit_code=0,
    )


def kinds(stock: Recorded, ours: Recorded, terms: Terms = Terms()) -> list[str]:  # noqa: B008  # frozen
    return [difference.partition(":")[0] for difference in compare(stock, ours, terms)]


def test_equal_runs_are_equal_although_each_intended_difference_is_there() -> None:
    assert kinds(of_stock(), of_ours()) == []


def split(run: Recorded) -> None:
    lr = {"lr": run.rows[0].pop("lr"), "global_step": 0, "samples": 0}
    run.rows.insert(1, lr)


def swap(run: Recorded) -> None:
    run.rows.insert(0, run.rows.pop())


PLANTED: dict[str, tuple[Callable[[Recorded], Any], list[str]]] = {
    "a row is split": (split, ["rows"]),
    "a row lies at another x": (lambda run: run.rows[1].update(global_step=2), ["rows"]),
    "a row is missing": (lambda run: run.rows.pop(1), ["rows"]),
    "rows in another order": (swap, ["rows"]),
    "another number": (lambda run: run.rows[1].update(loss=0.2500001), ["rows"]),
    "a flag": (lambda run: run.rows[1].update({DEGRADED: 1}), ["rows"]),
    "another summary": (lambda run: run.summary.update(loss=0.25), ["summary"]),
    "another config": (lambda run: run.config.update(lr=0.2), ["config"]),
    "a name is not on the user's axis": (lambda run: run.axes.pop("val*"), ["axis"]),
    "a name is on a wrong axis": (lambda run: run.axes.update(lr="samples"), ["axis"]),
    "another exit code": (lambda run: setattr(run, "exit_code", 1), ["exit code"]),
    "a damaged file": (lambda run: setattr(run, "problem", "bad block"), ["unreadable"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found(name: str) -> None:
    plant, expected = PLANTED[name]
    ours = of_ours()
    plant(ours)
    assert kinds(of_stock(), ours) == expected


def test_means_and_truth_values_of_several_ranks_are_numbers() -> None:
    stock, ours = of_stock(), of_ours()
    stock.rows[0]["loss"], ours.rows[0]["loss"], ours.rows[2]["ok"] = 0.1, 0.10000000000000002, 1
    terms = Terms(has_peers=True)
    assert kinds(stock, ours, terms) == []
    ours.rows[2]["ok"] = 0
    assert kinds(stock, ours, terms) == ["rows"]


def test_calls_at_one_position_of_a_frameworks_axis_may_be_one_row_but_not_leave_one_without_values() -> None:
    terms = Terms(x="", joined=frozenset({"step", "epoch"}))
    whole = {"step": 1, "epoch": 0, "loss": 0.5, "val/loss": 0.25}
    parts = [{"step": 1, "epoch": 0, "loss": 0.5}, {"step": 1, "epoch": 0, "val/loss": 0.25}]
    later = {"step": 2, "epoch": 0, "loss": 0.25}
    stock = Recorded(rows=[{**row, "_step": number} for number, row in enumerate([*parts, later])])
    assert kinds(stock, Recorded(rows=[whole, later]), terms) == []
    assert kinds(stock, Recorded(rows=[whole, {"step": 1, "epoch": 0}, later]), terms) == ["rows"]
    assert kinds(stock, Recorded(rows=[{**whole, "step": 2}, later]), terms) == ["rows"]
    assert kinds(stock, Recorded(rows=[parts[0], later, parts[1]]), terms) == ["rows"]
