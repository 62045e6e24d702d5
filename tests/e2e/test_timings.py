"""`timings=True` under a real Trainer, one rank of which takes longer for each batch."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from processes import run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "slowed.py"
SLOW = 0


def test_the_slow_rank_is_named_and_no_other_one(tmp_path: Path) -> None:
    run_job(*torchrun(SCRIPT, tmp_path, processes=3), cwd=tmp_path).check()
    (run,) = ended_runs(tmp_path, 1)
    metrics = run.metrics
    named = metrics["time/straggler_rank"]
    assert (named.smallest, named.largest) == (SLOW, SLOW)
    assert metrics["time/straggler_excess"].last > 0.05
    assert metrics["time/data/argmax_rank"].counts[0][0] == SLOW
    assert min(metrics["time/data/max"].trend) >= 0.15
    assert metrics["time/data/min"].smallest < 0.15
    assert median(metrics["time/forward/max"].trend) < 0.1, "waiting for copies of buffers does not count as computing"
    assert metrics["time/optimizer"].count == metrics["time/forward"].count == metrics["time/step"].count >= 20
