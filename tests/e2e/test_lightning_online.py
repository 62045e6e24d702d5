"""Lightning online: ranks that inherit a run by a fork. For ddp see test_real_runs.py."""

from __future__ import annotations

from pathlib import Path

from processes import python, run_job
from stored import ROWS
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "fit_and_test.py"


def test_fit_and_test_of_forked_ranks_are_one_run(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = python(SCRIPT, tmp_path)
    run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    run = wandb_server.run("exp")
    assert (run.completions, run.exit_codes) == (1, [0])
    assert (run.display_name, run.config) == ("nm", {"lr": 0.1})
    expected = {
        "loss": [5.0 + step for step in range(ROWS)],  # of 10 * rank + step
        "tested": [6.0],  # of 10 * rank + 1
        "by_wandb": [0.5] * ROWS,  # wandb's own functions do not reach the run that rank 1 has inherited
    }
    assert {name: [row[name] for row in run.rows if name in row] for name in expected} == expected
