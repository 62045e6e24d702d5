"""`timings=True` under a real Trainer: the example with a slow rank."""

from __future__ import annotations

from pathlib import Path

from processes import python, run_job
from stored import ended_runs

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning" / "slow_rank.py"
SLOW = 0


def test_the_slow_rank_is_named_and_no_other_one(tmp_path: Path) -> None:
    slow = ("--slow-rank", SLOW, "--slowdown", 2)  # a difference that a busy machine does not hide
    run_job(*python(EXAMPLE, "--devices", 3, "--epochs", 5, *slow, "--log-dir", tmp_path), cwd=tmp_path).check()
    (run,) = ended_runs(tmp_path, 1)
    metrics = run.metrics
    named = metrics["time/straggler_rank"]
    assert (named.smallest, named.largest) == (SLOW, SLOW)
    assert metrics["time/straggler_excess"].last > 0.05
    assert metrics["time/data/argmax_rank"].counts[0][0] == SLOW
    assert metrics["time/optimizer"].count == metrics["time/forward"].count == metrics["time/step"].count >= 20
