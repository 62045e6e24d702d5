"""Lightning online: fit and test of one Trainer are one run if it starts processes. For ddp see test_real_runs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import python, run_job
from stored import ROWS
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"


MEAN = [5.0 + step for step in range(ROWS)]  # of 10 * rank + step
TESTED = [6.0]  # of 10 * rank + 1


@pytest.mark.parametrize(
    ("strategy", "run_mode", "completions"),
    [
        ("ddp_spawn", "shared", 2),  # each stage has its own processes, which attach again
        ("ddp_fork", "auto", 1),
    ],
)
def test_fit_and_test_are_one_run(
    wandb_server: WandbServer, tmp_path: Path, strategy: str, run_mode: str, completions: int
) -> None:
    job = python(SCRIPTS / "fit_and_test.py", tmp_path, strategy, run_mode, "global")
    run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    run = wandb_server.run("exp")
    assert (run.completions, run.exit_codes) == (completions, [0] * completions)
    assert (run.display_name, run.config) == ("nm", {"lr": 0.1})
    assert [row["loss"] for row in run.rows if "loss" in row] == MEAN
    assert [row["tested"] for row in run.rows if "tested" in row] == TESTED
    if strategy == "ddp_fork":  # wandb's own functions do not reach the run that rank 1 has inherited
        assert [row["by_wandb"] for row in run.rows if "by_wandb" in row] == [0.5] * ROWS
    if run_mode == "shared":
        for rank in (0, 1):
            own = [row[f"rank-{rank}/loss"] for row in run.rows if f"rank-{rank}/loss" in row]
            assert own == [10.0 * rank + step for step in range(ROWS)]
