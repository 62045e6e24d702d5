from __future__ import annotations

from typing import Any

from dist_wandb.cli.report import files
from dist_wandb.cli.report.files import Rows
from dist_wandb.cli.report.thinning import Budget


def rows_of(*items: dict[str, Any], axis: str | None = "global_step") -> Rows:
    made = Rows()
    if axis:
        made.define({"glob_name": "*", "step_metric": axis})
    for item in items:
        made.add(item)
    made.end(Budget(10_000))
    return made


def points(found: Rows, name: str) -> list[tuple[float, float]]:
    return found.curves[name].points()


def test_of_several_definitions_the_longest_pattern_and_the_exact_name_win() -> None:
    made = Rows()
    made.define({"glob_name": "*", "step_metric": "global_step"})
    made.define({"glob_name": "val/*", "step_metric": "epoch"})
    made.define({"name": "val/acc", "step_metric": "seen"})
    made.add(dict.fromkeys(("loss", "val/loss", "val/acc", "global_step", "epoch", "seen"), 1.0))
    made.end(Budget(10_000))
    axes = [made.curves[name].axis for name in ("loss", "val/loss", "val/acc")]
    assert axes == ["global_step", "epoch", "seen"]


def test_without_a_definition_or_its_values_rows_are_counted_as_w_and_b_does() -> None:
    found = rows_of({"loss": 1.0, "_step": 3}, {"loss": 2.0, "_step": 4}, axis=None)
    assert points(found, "loss") == [(3, 1.0), (4, 2.0)]
    found = rows_of({"loss": 1.0, "_step": 3}, axis="epoch")
    assert (points(found, "loss"), found.curves["loss"].axis) == ([(3, 1.0)], "_step")


def test_names_beyond_the_limit_are_only_counted() -> None:
    row = {f"m{number}": 1.0 for number in range(3 * files.MOST_NAMES)}
    found = rows_of({**row, "x" * 300: 1.0}, axis=None)
    assert len(found.curves) == files.MOST_NAMES
    assert found.left_out == 2 * files.MOST_NAMES + 1
