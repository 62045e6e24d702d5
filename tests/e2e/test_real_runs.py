"""Runs that are opened before or after others usually are, with real processes and wandb, offline.

For all modes see test_hosts.py and test_launchers.py, for Lightning on two nodes test_patterns.py, with other
strategies test_lightning_everything.py and test_lightning_online.py, with an early use test_lightning_folds.py.
"""

from __future__ import annotations

from pathlib import Path

from history import history_of
from processes import python, run_job, torchrun
from stored import ended_runs

SCRIPTS = Path(__file__).parent / "scripts"


def test_ranks_share_a_run_before_and_after_their_process_group(tmp_path: Path) -> None:
    finished = run_job(*torchrun(SCRIPTS / "meet_late.py", tmp_path), cwd=tmp_path).check()
    (run_id,) = {stored.run_id for stored in ended_runs(tmp_path, 2)}
    assert finished.lines("SAW ") == [f"SAW {run_id}"] * 2


def test_lightning_after_an_init_before_fit_has_that_run_alone(tmp_path: Path) -> None:
    finished = run_job(*python(SCRIPTS / "init_before_fit.py", tmp_path), cwd=tmp_path).check()
    (stored,) = ended_runs(tmp_path, 1)
    history = history_of(stored, "trainer/global_step")
    assert (history.values("rank"), history.values("after")) == ([0.5] * 3, [1.5])
    assert (stored.config["width"], history.is_flagged) == (3, False)
    assert "Traceback" not in finished.output
    assert not [line for line in finished.lines("dist_wandb: ") if "run_mode=auto" not in line]
