"""A job of as many ranks as a machine with two cores can run: `benchmarks/scale.py`, which reports failures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import clean_environment, run_job

if TYPE_CHECKING:
    from processes import Finished

ROOT = Path(__file__).parents[2]
RANKS = 128
MOST_MEMORY = 40.0  # MiB of private memory of a rank


def play(tmp_path: Path, ranks: int, limit: float, *options: str) -> tuple[Finished, dict[str, Any]]:
    """Run the benchmark at a lower priority: it would slow down all concurrent tests."""
    program = [sys.executable, "-m", "benchmarks.scale", "--ranks", str(ranks), "--limit", str(limit), *options]
    command = ["nice", "-n", "10", *program]
    finished = run_job(command, cwd=ROOT, environment=clean_environment(TMPDIR=str(tmp_path)), timeout=290)
    start, end = finished.output.find("{"), finished.output.rfind("}")
    assert start >= 0, finished.output
    return finished, json.loads(finished.output[start : end + 1])


@pytest.mark.cold  # a warm interpreter has more memory that is copied for each rank
def test_all_rows_of_many_ranks_are_reduced(tmp_path: Path) -> None:
    finished, report = play(tmp_path, RANKS, 250)
    finished.check()
    (job,) = report["jobs"]
    assert report["failures"] == []
    rows = job["rows"]
    assert (rows["logged"], rows["brought_together"], rows["flagged"]) == (10, 10, 0)
    assert (job["reported"], job["flushed"], job["exit_codes"]) == (RANKS, RANKS, {"0": RANKS})
    assert 0 < job["private_mb"] < MOST_MEMORY


def test_a_job_that_times_out_is_a_failure(tmp_path: Path) -> None:
    finished, report = play(tmp_path, 2, 0.01, "--pause", "60")  # no rank ends before it is killed
    (code,) = finished.exit_codes
    assert code == 1
    assert report["failures"][0] == "2 ranks: exit codes {-9: 2}"
    assert any("flush returned true on 0" in failure for failure in report["failures"])
