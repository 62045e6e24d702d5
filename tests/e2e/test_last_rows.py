"""What `log` has accepted is in the file at the end, right or marked; or a message has the number of lost rows."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from history import histories, history_of
from processes import Finished, run_job
from ranks import rank_commands
from stored import ended_runs

SCRIPT = Path(__file__).parent / "scripts" / "last_rows.py"
ROWS = 400


def play(directory: Path, kind: str) -> tuple[list[int], dict[int, float], dict[int, int], int | None, Finished]:
    """Return the steps of the rows, the loss and the flag by step, the exit code of the run, and the job."""
    commands = rank_commands(SCRIPT, directory / "runs", kind, world_size=2)
    finished = run_job(*commands, cwd=directory)
    (run,) = ended_runs(directory / "runs", 1)
    found = history_of(run)
    return [row["global_step"] for row in found.rows], found.last("loss"), found.flags("loss"), run.exit_code, finished


def test_a_second_ctrl_c_gives_up_the_last_rows_and_says_so(tmp_path: Path) -> None:
    steps, _, _, code, finished = play(tmp_path, "interrupted")
    assert finished.exit_codes == (-signal.SIGINT, 0), finished.output
    lost = int(re.findall(r"about (\d+) rows of rank 0 are lost: writing them was interrupted", finished.output)[0])
    assert steps == list(range(len(steps)))
    assert abs(len(steps) + lost - ROWS) <= 5
    assert code == 255


def test_rows_of_a_signal_handler_and_of_atexit_are_whole(tmp_path: Path) -> None:
    steps, loss, flags, code, finished = play(tmp_path, "handlers")
    finished.check()
    assert steps == list(range(ROWS + 2))
    assert [loss[step] for step in (ROWS - 2, ROWS, ROWS + 1)] == [1.0, 0.5, 0.5]
    assert (set(flags.values()), code) == ({0}, 0)
    assert not re.search("lost|flagged|failed|without", finished.output), finished.output


def test_rows_are_whole_if_all_ranks_raise_before_the_run_is_open(tmp_path: Path) -> None:
    steps, loss, flags, code, finished = play(tmp_path, "early")
    assert (finished.exit_codes, code) == ((1, 1), 1), finished.output
    assert (steps, loss) == ([0, 1, 2], dict.fromkeys(range(3), 0.5))
    assert set(flags.values()) == {0}
    assert "Rank 1 failed" not in finished.output


def test_the_last_row_of_a_label_without_the_users_axis_is_written_if_rank_0_finishes_later(tmp_path: Path) -> None:
    run_job(*rank_commands(SCRIPT, tmp_path, "shared", world_size=2), cwd=tmp_path).check()
    rows = histories(tmp_path, 2)[1]
    assert rows.last("rank-1/loss") == dict.fromkeys(range(3), 1.0)
    assert all("rank-1/size" in row for row in rows.rows_with("rank-1/loss"))  # calls of one step are one row
