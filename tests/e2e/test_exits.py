"""A session's thread never disturbs an exit: of scripts without `finish`, and of processes that a rank starts."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from history import STEPS, history, history_of
from processes import Finished, clean_environment, run_job, torchrun
from ranks import rank_commands
from stored import ended_runs

SCRIPTS = Path(__file__).parent / "scripts"
SUPPORT = Path(__file__).parents[1] / "support"
TIMES = 2  # with a store over TCP, and one in a file
NATIVE_FAILURES = (
    *("terminate called", "Aborted", "Fatal Python error", "Segmentation fault", "core dumped"),
    *("_enter_buffered_busy", "Exception ignored", "pure virtual method"),
)


def environment() -> dict[str, str]:
    return clean_environment(PYTHONPATH=str(SUPPORT))


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
    "multiprocessing": [0, 0],
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """The results of the repetitions of each kind, all started by one job."""
    directory = tmp_path_factory.mktemp("ends")
    kinds = [f"{kind}={TIMES}" for kind in CODES]
    command: list[str | Path] = [sys.executable, SCRIPTS / "exits.py", directory, *kinds]
    finished = run_job(command, cwd=directory, environment=environment(), timeout=400).check()
    outputs = re.split(r"^KIND (\w+)$", finished.output, flags=re.MULTILINE)[1:]
    return {kind: Finished((0,), output) for kind, output in zip(outputs[::2], outputs[1::2], strict=True)}


@pytest.mark.cold  # a forked child's exit is shorter
@pytest.mark.parametrize("kind", CODES)
def test_a_script_without_finish_always_keeps_its_own_exit_code(ends: dict[str, Finished], kind: str) -> None:
    codes = Counter(line.split(maxsplit=2)[2] for line in ends[kind].lines("CODES "))
    assert codes == {str(CODES[kind]): TIMES}, ends[kind].output
    check_quiet(ends[kind])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        pytest.param("normal", 0, marks=pytest.mark.cold),
        ("destroyed", 0),
        ("sys_exit", 3),
        ("exception", 1),
    ],
)
def test_rows_logged_before_an_exit_without_finish_are_written(tmp_path: Path, kind: str, code: int) -> None:
    commands = rank_commands(SCRIPTS / "ends_without_finish.py", tmp_path, kind, world_size=2)
    finished = run_job(*commands, cwd=tmp_path, environment=environment(), timeout=240)
    assert finished.exit_codes == (code, code), finished.output
    check_quiet(finished)
    (run,) = ended_runs(tmp_path, 1)
    found = history_of(run)
    of_both = {step: 2.0 * step + 0.5 for step in range(STEPS)}
    if kind == "exception":  # after a failure no rank is waited for: a row may have rank 0's number only
        assert list(found.last("loss")) == list(range(STEPS))
        assert all(value in (2.0 * step, of_both[step]) for step, value in found.last("loss").items())
    else:
        assert found.last("loss") == of_both
        assert not found.is_flagged
    assert run.exit_code == code


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_logs_of_dataloader_workers_arrive_and_do_not_end_the_run(tmp_path: Path, context: str) -> None:
    job = torchrun(SCRIPTS / "data_workers.py", tmp_path, context)
    finished = run_job(*job, cwd=tmp_path, environment=environment(), timeout=240).check()
    check_quiet(finished)
    found = history(tmp_path)
    epochs = {8 * epoch + index: 2.0 * index + 0.5 for epoch in range(2) for index in range(8)}
    assert found.last("loss") == epochs
    assert found.written("loss") == Counter(epochs.keys())
    assert found.values("before") == found.values("after") == [1.0]
    assert found.values("in_worker") == [3.0] * 16
    assert found.last("by_index") == {index: float(index) for index in range(8)}
    assert not found.is_flagged
