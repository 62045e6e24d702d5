"""`timings=True` of the integrations: real ranks, one of which takes longer for each batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "slowed.py"
SLOW = 0


@pytest.mark.parametrize(("framework", "ranks"), [("lightning", 4), ("accelerate", 2), ("transformers", 2)])
def test_the_slow_rank_is_named_and_no_other_one(framework: str, ranks: int, tmp_path: Path) -> None:
    run_job(*torchrun(SCRIPT, framework, tmp_path, processes=ranks), cwd=tmp_path, timeout=240).check()
    (run,) = ended_runs(tmp_path, 1)
    metrics = run.metrics
    named = metrics["time/straggler_rank"]
    assert (named.smallest, named.largest) == (SLOW, SLOW)
    assert metrics["time/straggler_excess"].trend[-2] > 0.05  # Accelerate prefetches: no excess in the last step
    assert metrics["time/data/argmax_rank"].counts[0][0] == SLOW
    assert min(metrics["time/data/max"].trend[:-1]) >= 0.15
    assert metrics["time/data/min"].smallest < 0.15
    assert metrics["time/forward/max"].trend[-1] < 0.1, "waiting for copies of buffers does not count as computing"
    assert metrics["time/optimizer"].count == metrics["time/forward"].count == metrics["time/step"].count >= 20
