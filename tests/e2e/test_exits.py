"""A session's thread never disturbs the exit of scripts without `finish`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from history import history
from processes import Finished, python, run_job

import dist_wandb

SCRIPTS = Path(__file__).parent / "scripts"
NATIVE_FAILURES = (
    *("terminate called", "Aborted", "Fatal Python error", "Segmentation fault", "core dumped"),
    *("_enter_buffered_busy", "Exception ignored", "pure virtual method"),
)


def check_quiet(finished: Finished) -> None:
    """Check that neither native code nor Python's shutdown has reported an error."""
    complaints = [text for text in NATIVE_FAILURES if text in finished.output]
    assert complaints == [], finished.output


CODES = {
    "normal": [0, 0],
    "guarded": [0, 0],
    "destroyed": [0, 0],
    "exception": [1, 1],
    "sys_exit": [3, 3],
    "ctrl_c": [-2, -2],
    "early_ctrl_c": [-2, -2],
    "one_fails": [0, 1],
}


@pytest.mark.cold  # a forked child's exit is shorter
def test_scripts_without_finish_always_keep_their_own_exit_codes(tmp_path: Path) -> None:
    finished = run_job(*python(SCRIPTS / "exits.py", tmp_path, *CODES), cwd=tmp_path).check()
    expected = sorted(f"CODES {kind} {codes}" for kind, codes in CODES.items())
    assert finished.lines("CODES ") == expected, finished.output
    check_quiet(finished)


@pytest.mark.cold  # Python forgets a Ctrl-C if a module with a dataclass is imported for the first time after it
def test_a_process_with_a_run_on_disk_ends_by_ctrl_c_as_without_a_run(tmp_path: Path) -> None:
    code = "import dist_wandb; dist_wandb.init('tests', mode='offline').log({'loss': 1.0}); raise KeyboardInterrupt"
    finished = run_job([sys.executable, "-c", code], cwd=tmp_path)
    assert finished.exit_codes == (-signal.SIGINT,), finished.output
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [255]


def test_ctrl_c_in_a_training_of_lightning_ends_the_run_before_the_trainer_kills_the_ranks(tmp_path: Path) -> None:
    finished = run_job(*python(SCRIPTS / "interrupted_fit.py", tmp_path), cwd=tmp_path)
    assert "Detected KeyboardInterrupt" in finished.output
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [1], finished.output
    assert history(tmp_path).values("loss") == [1.0] * 3, finished.output
    assert not history(tmp_path).is_flagged
