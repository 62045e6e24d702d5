"""A loop over folds with a run for each, whose `experiment` the script uses before `fit`, as with the stock logger."""

from __future__ import annotations

from pathlib import Path

import pytest
from history import history_of
from processes import python, run_job
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "lightning_folds.py"


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_finish_ends_the_run_of_a_fold_with_the_exit_code_of_its_last_stage(tmp_path: Path, strategy: str) -> None:
    run_job(*python(SCRIPT, strategy), cwd=tmp_path).check()
    runs = {run.run_id: run for run in ended_runs(tmp_path, 3)}
    assert {name: run.exit_code for name, run in runs.items()} == {"good": 0, "failed": 1, "recovered": 0}
    assert {name: run.config["fold"] for name, run in runs.items()} == {name: name for name in runs}
    assert history_of(runs["good"], "trainer/global_step").values("loss") == [5.0, 5.0]
