"""Jobs of scripts that import `pytorch_lightning`, without the package `lightning`."""

from __future__ import annotations

import json
from pathlib import Path

from history import history_of
from processes import python, run_job
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "pytorch_lightning_job.py"
SPENT = {f"time/{part}" for part in ("data", "forward", "backward", "optimizer")}


def test_a_job_has_one_run_with_weighted_means_timings_and_its_id_in_the_checkpoint(tmp_path: Path) -> None:
    """With ddp_spawn. For ddp, in which nothing depends on the name space, see test_real_runs.py."""
    finished = run_job(*python(SCRIPT, tmp_path), cwd=tmp_path).check()
    facts = dict(json.loads(line.removeprefix("SAW ")) for line in finished.lines("SAW "))
    assert facts == {rank: {"is stock": True, "is dummy": rank == 1, "id": "exp"} for rank in (0, 1)}
    assert finished.lines("ID IN CHECKPOINT") == ["ID IN CHECKPOINT exp"]
    assert "sync_dist=True" not in finished.output
    (run,) = ended_runs(tmp_path, 1)
    assert (run.run_id, run.exit_code) == ("exp", 0)
    history = history_of(run, "trainer/global_step")
    assert {name: history.values(name) for name in ("trained", "validated")} == {
        "trained": [5.0] * 4,
        "validated": [2.0],
    }
    assert history.names >= SPENT
    assert not history.is_flagged
