"""Jobs on one CUDA device, whose default group is NCCL's or gloo's; dist_wandb's own group is gloo's."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_job, torchrun
from stored import ended_runs, read_history

SCRIPT = Path(__file__).parent / "scripts" / "two_ranks.py"
ROWS = 30


@pytest.mark.cold
@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("nccl", 2), ("gloo", 2), ("cpu:gloo,cuda:nccl", 2)])
def test_one_run_has_the_means_of_all_ranks(backend: str, ranks: int, tmp_path: Path) -> None:
    command = torchrun(SCRIPT, backend, tmp_path, processes=ranks)
    job = run_job(*command, cwd=tmp_path, timeout=120).check()
    assert "Traceback" not in job.output
    (run,) = ended_runs(tmp_path, 1)
    assert run.exit_code == 0
    rows = [row for row in read_history(run.path) if "loss" in row]
    assert len(rows) == ROWS, job.output
    reduced = 3 if backend == "gloo" else 1 if ranks == 1 else 1.75  # else the mean, weighted with 1 and 3
    for step, row in enumerate(rows):
        assert (row["global_step"], "dist_wandb/degraded" in row) == (step, False), job.output
        assert row["loss"] == step + (0 if ranks == 1 else 0.75)
        assert row["metric"] == step + (0 if ranks == 1 else 0.5)
        assert row["gradient"] == reduced
    assert rows[-1]["table.nrows"] == ranks
