"""trl's GRPOTrainer under torchrun: what it logs by itself, which it does only if the Trainer reports to wandb."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from processes import run_job, torchrun
from wandb_server import WandbServer

SCRIPT = Path(__file__).parent / "scripts" / "trl_runs.py"

# As seen with `trl_runs.py OUT stock` and two ranks: trl 1.16.0, transformers 5.23.0, wandb 0.31.0.
TIMED = (
    *("transformers.generate", "letters", "_calculate_rewards", "_prepare_inputs"),
    *("_get_per_token_logps_and_entropies", "compute_loss"),
)
TABLES = [(1, 4), (2, 4), (2, 4)]  # step, and completions of both ranks; the last is that of the end
METRICS = [(1, 25), (2, 25), (2, 2)]  # step, and number of names; the last row is that of the end


def test_tables_and_times_are_logged_as_with_the_stock_callback(wandb_server: WandbServer, tmp_path: Path) -> None:
    packages = [str(path) for path in Path(sys.prefix, "trl").glob("lib/*/site-packages")]
    assert packages, "`make test` installs trl there"
    environment = wandb_server.environment(tmp_path, PYTHONPATH=packages[0])
    job = torchrun(SCRIPT, tmp_path / "out", "ours")
    finished = run_job(*job, cwd=tmp_path, environment=environment).check()

    (run,) = wandb_server.runs.values()
    rows = [{name: row[name] for name in row if not name.startswith("_")} for row in run.rows]
    timed = Counter((row["train/global_step"], name) for row in rows for name in row if name.startswith("profiling/"))
    assert timed == Counter((step, f"profiling/Time taken: GRPOTrainer.{name}") for step in (0, 1) for name in TIMED)
    tables = [row for row in rows if "completions" in row]
    assert [(row["train/global_step"], row["completions"]["nrows"]) for row in tables] == TABLES
    stored = [json.loads(run.files[row["completions"]["path"]]) for row in tables]
    assert [table["columns"] for table in stored] == [["step", "prompt", "completion", "letters", "advantage"]] * 3
    metrics = [row for row in rows if "train/epoch" in row]
    assert [(row["train/global_step"], len(row)) for row in metrics] == METRICS
    assert len(rows) == timed.total() + len(tables) + len(metrics)
    assert run.exit_codes == [0]
    assert len(finished.lines("dist_wandb: ")) == 1, finished.output  # the run's line, and no warning
