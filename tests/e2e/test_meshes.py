"""Model-parallel training, as whole jobs: the example, and the meshes of Lightning and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
from history import histories, history
from processes import clean_environment, run_job, torchrun

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLE = Path(__file__).parents[2] / "examples" / "patterns" / "meshes.py"


def test_fsdp_with_tensor_parallelism_counts_each_replica_once(tmp_path: Path) -> None:
    """Four ranks: two replicas in two parts each. Odd ranks hold the second parts, and have the same losses."""
    environment = clean_environment(DIST_WANDB_RUN_MODE="shared")
    job = torchrun(EXAMPLE, "tensor", processes=4)
    finished = run_job(*job, cwd=tmp_path, environment=environment).check()
    assert "written by ranks 0, 2" in finished.output
    found = histories(tmp_path, 2)
    own = {rank: found[rank].last(f"rank-{rank}/loss") for rank in (0, 2)}
    losses = found[0].last("loss")
    assert len(losses) == 29
    for step in range(28):  # the last batch is smaller, and its sizes are the weights
        assert losses[step] == pytest.approx((own[0][step] + own[2][step]) / 2)
    assert losses[28] < losses[0]
    assert not found[0].is_flagged


def test_the_last_stage_of_a_pipeline_has_the_loss(tmp_path: Path) -> None:
    """Four ranks: two stages of two replicas each. The last rank is the primary."""
    environment = clean_environment(DIST_WANDB_RUN_MODE="shared")
    job = torchrun(EXAMPLE, "pipeline", processes=4)
    finished = run_job(*job, cwd=tmp_path, environment=environment).check()
    assert "written by ranks 2-3" in finished.output or "written by ranks 2, 3" in finished.output
    found = histories(tmp_path, 2)
    assert sorted(found) == [2, 3]
    own = {rank: found[rank].last(f"rank-{rank}/loss") for rank in (2, 3)}
    losses = found[3].last("loss")
    assert losses == pytest.approx({step: (own[2][step] + own[3][step]) / 2 for step in losses})
    assert len(losses) == 28
    assert losses[27] < losses[0]


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_the_mesh_of_a_framework_is_detected(framework: str, tmp_path: Path) -> None:
    """Four ranks, two replicas in two parts: rank r logs 10 ** r, and no unit is passed."""
    run_job(*torchrun(SCRIPTS / "mesh_of_frameworks.py", framework, processes=4), cwd=tmp_path).check()
    found = history(tmp_path)
    assert set(found.values("loss")) == {50.5}  # of ranks 0 and 2
