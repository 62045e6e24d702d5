"""Each written row is reported with its place among the user's writes into the summary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from tests.unit.exchange.test_rows import Unit
from tests.unit.runs.test_summary import Run

from dist_wandb.exchange.rows import Contribution
from dist_wandb.runs.summary import SummaryWrites

Place = tuple[list[str], "int | None", "int | None", bool, bool]


def recorded(unit: Unit, rank: int = 0) -> list[Place]:
    """Return the list into which the places of the rows will be recorded."""
    places: list[Place] = []

    def keep(names: Iterable[str], follows: Any, x: Any, *, is_open: bool, corrects: bool = False, **_: int) -> None:
        if names:
            places.append(([*names], follows, x, is_open, corrects))

    unit.ranks[rank].keep_summary = keep
    return places


def log(unit: Unit, rank: int, metrics: dict[str, Any], step: int | None, follows: int, commit: Any = None) -> None:
    x = -1 if step is None else step
    contribution = Contribution(metrics, step, commit, None, x, writes_before=follows)
    unit.ranks[rank].post(contribution, unit.rounds[rank], unit.protocol.now)


def summarized(unit: Unit) -> Run:
    """Return the run of rank 0, with a summary as wandb has it."""
    run, summary = Run(), SummaryWrites("global_step")
    summary.follow(run)  # type: ignore[arg-type]  # stands in for wandb's

    def keep(row: dict[str, Any], follows: Any, x: Any, **kwargs: Any) -> None:
        run.values.update({**row, "global_step": x} if row else {})
        summary.keep(row, follows, x, **kwargs)

    unit.ranks[0].keep_summary = keep
    return run


def test_the_summary_has_the_last_row_of_a_rank_that_is_behind() -> None:
    """It logs rows alone before, while the other one's call for the last row has come already."""
    unit = Unit()
    run = summarized(unit)
    log(unit, 1, {"after": 1.0}, 9, 0, commit=True)
    log(unit, 0, {"only": 1.0}, 8, 0, commit=True)
    log(unit, 0, {"image": "a"}, 8, 0, commit=True)
    log(unit, 0, {"after": 3.0}, 9, 0, commit=True)
    unit.close()
    assert run.values == {"only": 1.0, "image": "a", "after": 2.0, "global_step": 9}


@pytest.mark.parametrize("commit", [None, True, False])
def test_a_row_of_one_rank_has_the_place_of_its_call(commit: Any) -> None:
    unit = Unit(1)
    places = recorded(unit)
    unit.ranks[0].write_own(Contribution({"loss": 1.0}, 4, commit, writes_before=2))
    assert places == [(["loss"], 2, 4, commit is False, False)]


def test_a_row_under_a_label_has_the_place_of_its_call() -> None:
    unit = Unit(run_mode="shared")
    places = recorded(unit, 1)
    log(unit, 1, {"loss": 1.0}, 4, 2)
    assert places == [(["rank-1/loss"], 2, 4, True, False)]


def test_a_row_that_cannot_be_made_costs_no_other_row(caplog: pytest.LogCaptureFixture) -> None:
    unit = Unit()
    fails = iter([True, True])

    def act(_: int | None) -> None:
        if next(fails, False):
            raise ValueError("cannot be carried out")

    unit.ranks[0].act = act
    for step in range(4):
        for rank in range(2):
            log(unit, rank, {"loss": 1.0}, step, 0)
    assert [row["global_step"] for row in unit.close()] == [2, 3]
    assert unit.ranks[0].writer.lost == {"that W&B refused": 2}
    assert caplog.text.count("could not write a row") == 1
