"""What the user writes into the summary of a run keeps its place among the rows, which are written later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dist_wandb


@pytest.mark.usefixtures("bare_environment")
def test_a_write_into_the_summary_stands_until_a_later_call_logs_the_name(tmp_path: Path) -> None:
    run: Any = dist_wandb.init(mode="offline", dir=str(tmp_path))
    run.log({"loss": 0.5})
    run.summary["loss"] = 9
    run.run.summary.update({"loss": 8, "best": 1})
    run.log({"acc": 0.4})
    assert run.flush()
    assert (run.summary["loss"], run.summary["best"], run.summary["acc"]) == (8, 1, 0.4)
    run.log({"loss": 0.25})
    assert run.flush()
    assert (run.summary["loss"], run.summary["best"]) == (0.25, 1)
    run.finish()
