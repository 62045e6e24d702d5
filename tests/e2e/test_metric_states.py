"""States of metrics in a job: their memory on ranks that compute nothing, and a rank that is late."""

from __future__ import annotations

from pathlib import Path

import pytest
from history import history_of
from processes import run_job, torchrun
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "metric_states.py"


def test_large_states_and_a_late_rank(tmp_path: Path) -> None:
    run_job(*torchrun(SCRIPT, tmp_path, processes=3), cwd=tmp_path).check()
    (run,) = ended_runs(tmp_path, 1)
    history = history_of(run)
    assert history.last("large") == {step: float(step) for step in range(1, 5)}
    for rank in (1, 2):
        states = float((tmp_path / f"peak_{rank}").read_text(encoding="utf-8"))
        assert states < 2.5, "a copy of its own state, and pieces of it"
    for step in range(5, 15):
        assert history.final(f"number{step}") == [1.0]
        assert history.final(f"mean{step}") == [pytest.approx(8 / 6)], "corrected when the late rank had come"
