"""How jobs end, online: the order of writers, one completion, and the exit code of the first failure.

For a rank that raises, after which its launcher ends the others, see the last case of `tests/contract`.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from history import STEPS, history
from processes import Finished, python, run_job, started
from ranks import rank_commands
from wandb_records import RecordedRun
from wandb_server import WandbServer

import dist_wandb

SCRIPTS = Path(__file__).parent / "scripts"
ROWS = {step: 2.0 * step + 0.5 for step in range(5)}


def recorded(server: WandbServer, tmp_path: Path, run_mode: str, *ends: str) -> tuple[RecordedRun, Finished]:
    """Return the run of two ranks without a launcher, which is stopped on W&B's page if one of them awaits it."""
    commands = rank_commands(SCRIPTS / "ends_online.py", tmp_path, run_mode, *ends, world_size=2)
    with started(*commands, cwd=tmp_path, environment=server.environment(tmp_path)) as job:
        if ends[0].startswith("is stopped"):
            server.wait_until(lambda: bool(server.runs) and loss(server.run("exp")) == ROWS, within=120)
            server.stopped_runs.add("exp")
        finished = job.wait(240)
    return server.run("exp"), finished


def loss(run: RecordedRun) -> dict[int, float]:
    return {row["global_step"]: row["loss"] for row in run.rows if "loss" in row}


@pytest.mark.parametrize(
    ("run_mode", "ends", "code", "codes"),
    [
        ("shared", ("destroys the group at last", "is late at last"), 0, (0, 0)),
        ("shared", ("ends at last", "exits with 3 at last"), 3, (0, 3)),
        ("shared", ("ends", "is killed"), 1, (0, -signal.SIGKILL)),
        ("auto", ("ends at last", "raises at last"), 1, (0, 1)),
        pytest.param(*("auto", ("ends at last", "exits with 3 at last"), 3, (0, 3)), marks=pytest.mark.cold),
        ("auto", ("is stopped at last", "logs on"), 255, (-signal.SIGINT, 0)),
        ("auto", ("is terminated", "ends"), 143, (-signal.SIGTERM, 0)),
    ],
)
def test_a_run_ends_once_with_the_first_failure(  # a table
    wandb_server: WandbServer,
    tmp_path: Path,
    run_mode: str,
    ends: tuple[str, str],
    code: int,
    codes: tuple[int, int],
) -> None:
    run, finished = recorded(wandb_server, tmp_path, run_mode, *ends)
    assert finished.exit_codes == codes
    assert "Lost rank" not in finished.output or -signal.SIGKILL in codes
    if ends[1] == "logs on":  # until rank 0 is gone, and with it the store
        assert re.search("Rank 0 failed after step|Rank 1 cannot reach the store", finished.output)
    assert (run.completions, run.exit_codes) == (1, [code])
    assert loss(run) == ROWS
    if ends[1].startswith("is late"):
        assert [row["rank-1/own-1"] for row in run.rows if "rank-1/own-1" in row] == [1.0]


def test_a_signal_handler_may_log_while_sigterm_ends_the_run(tmp_path: Path) -> None:
    finished = run_job(*python(SCRIPTS / "logs_at_signals.py", tmp_path), cwd=tmp_path, timeout=60)
    assert finished.exit_codes == (-signal.SIGTERM,)
    assert "Traceback" not in finished.output
    assert history(tmp_path).values("loss") == list(range(STEPS))
    assert [run.exit_code for run in dist_wandb.read_runs(tmp_path)] == [143]
