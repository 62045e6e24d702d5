"""A job of as many ranks as a machine with two cores can run: `benchmarks/scale.py`, which reports failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import clean_environment, run_job

ROOT = Path(__file__).parents[2]
RANKS = 20  # in groups of 16, as with 128
MOST_MEMORY = 40.0  # MiB of private memory of a rank


@pytest.mark.cold  # a warm interpreter has more memory that is copied for each rank
def test_all_rows_of_many_ranks_are_reduced(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "benchmarks.scale", "--ranks", str(RANKS), "--limit", "250"]
    command = ["nice", "-n", "10", *program]  # it would slow down all concurrent tests
    output = run_job(command, cwd=ROOT, environment=clean_environment(TMPDIR=str(tmp_path)), timeout=290).check().output
    report = json.loads(output[output.find("{") : output.rfind("}") + 1])
    (job,) = report["jobs"]
    assert report["failures"] == []
    rows = job["rows"]
    assert (rows["logged"], rows["brought_together"], rows["flagged"]) == (10, 10, 0)
    assert (job["reported"], job["flushed"], job["exit_codes"]) == (RANKS, RANKS, {"0": RANKS})
    assert 0 < job["private_mb"] < MOST_MEMORY
