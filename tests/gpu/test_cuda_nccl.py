"""Jobs whose default group is NCCL's, with each rank on its own GPU, or all on one, which NCCL 2.30 can; or gloo's."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import clean_environment, run_job, started, torchrun, wait_until
from stored import ended_runs, find_runs, read_files, read_history

from dist_wandb.wandb_files.reading import StoredRun

SCRIPT = Path(__file__).parent / "scripts" / "nccl_ranks.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
SEVERAL = "NCCL_MULTI_RANK_GPU_ENABLE"
pytestmark = pytest.mark.cold
cuda: Any = torch.cuda  # not all of it has types


def nccl_version() -> tuple[int, ...]:
    """Return the version of the library that torch has loaded, which may differ from the one it was built with."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is a part of torch
        return tuple(cuda.nccl.version())
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def variables(ranks: int) -> dict[str, str]:
    """Return the environment of a job of so many ranks, or skip the test: its devices cannot have them."""
    devices, version = cuda.device_count(), nccl_version()
    if ranks <= devices:
        return clean_environment()
    if version < (2, 30):
        found = ".".join(map(str, version))
        pytest.skip(f"{ranks} ranks on {devices} GPU need NCCL 2.30 or newer ({SEVERAL}); torch has loaded {found}")
    return clean_environment(**{SEVERAL: "1"})


def line_of(mark: str) -> str:
    """Return where the script's line with a comment is."""
    (number,) = [number for number, line in enumerate(LINES, 1) if line.endswith(f"  # {mark}")]
    return f"nccl_ranks.py:{number}"


def rows_of(run: StoredRun, name: str = "loss") -> list[dict[str, Any]]:
    return [row for row in read_history(run.path) if name in row]


@pytest.mark.parametrize(("backend", "ranks"), [("nccl", 1), ("nccl", 2), ("gloo", 2), ("cpu:gloo,cuda:nccl", 2)])
def test_a_group_of_any_backend_has_one_run_with_the_means_of_all_ranks(
    backend: str, ranks: int, tmp_path: Path
) -> None:
    command = torchrun(SCRIPT.with_name("two_ranks.py"), backend, tmp_path, processes=ranks)
    job = run_job(*command, cwd=tmp_path, timeout=120).check()
    assert "Traceback" not in job.output
    (run,) = ended_runs(tmp_path, 1)
    assert run.exit_code == 0
    rows = rows_of(run)
    assert len(rows) == 30, job.output
    reduced = 3 if backend == "gloo" else 1 if ranks == 1 else 1.75  # else the mean, weighted with 1 and 3
    for step, row in enumerate(rows):
        assert (row["global_step"], "dist_wandb/degraded" in row) == (step, False), job.output
        assert row["loss"] == step + (0 if ranks == 1 else 0.75)
        assert row["metric"] == step + (0 if ranks == 1 else 0.5)
        assert row["gradient"] == reduced
    assert rows[-1]["table.nrows"] == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_has_one_run_with_the_means_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    command = torchrun(SCRIPT, "ddp", tmp_path, processes=ranks)
    job = run_job(*command, cwd=tmp_path, environment=variables(ranks), timeout=90).check()
    (message,) = job.lines("dist_wandb: ")  # no warning
    assert "one run for all ranks" in message
    assert "Traceback" not in job.output
    (run,) = ended_runs(tmp_path, 1)
    mean = (ranks + 1) / 2  # of the ranks' inputs, and so of their gradients
    rows = [(row["global_step"], row["loss"], row["gradient"]) for row in rows_of(run)]
    assert rows == [(step, -step / 8 * mean**2, mean) for step in range(200)]
    assert not [row for row in rows_of(run) if "dist_wandb/degraded" in row]


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_frameworks_have_one_run_with_the_means_of_all_ranks(framework: str, tmp_path: Path) -> None:
    """On one device, each rank is a node of its own: frameworks choose devices by the rank within its node."""
    nodes = 1 if cuda.device_count() >= 2 else 2
    command = torchrun(SCRIPT, framework, tmp_path, processes=2 // nodes, nodes=nodes)
    job = run_job(*command, cwd=tmp_path, environment=variables(2), timeout=90).check()
    (run,) = ended_runs(tmp_path, 1)
    assert [row["loss"] for row in rows_of(run)] == [step + 0.5 for step in range(20)], job.output
    assert not [row for row in rows_of(run) if "dist_wandb/degraded" in row], job.output


def test_log_does_not_wait_for_a_collective_that_the_other_rank_has_not_joined(tmp_path: Path) -> None:
    command = torchrun(SCRIPT, "late", tmp_path)
    job = run_job(*command, cwd=tmp_path, environment=variables(2), timeout=90).check()
    (line,) = job.lines("rank 0 logged in ")
    assert line.endswith("the collective was over: False"), job.output
    assert float(line.split()[4]) < 0.5, job.output
    (run,) = ended_runs(tmp_path, 1)
    assert [(row["total"], row["again"], row["other"]) for row in rows_of(run, "total")] == [(1, 1, 1), (2, 2, 2)]


def test_a_rank_that_dies_ends_the_job_and_its_rows_are_kept(tmp_path: Path) -> None:
    """torchrun kills the rank that waits for its device after 30 s; then no exit code is written."""
    command = torchrun(SCRIPT, "dies", tmp_path)
    job = run_job(*command, cwd=tmp_path, environment=variables(2), timeout=90)
    assert job.exit_codes == (1,), job.output
    assert re.search(r"exitcode +: 7 ", job.output), job.output
    (run,), errors = read_files(find_runs(tmp_path))
    assert not errors
    assert run.state in ("failed", "unfinished"), job.output
    assert [row["global_step"] for row in rows_of(run)] == list(range(20)), job.output


BEHIND = r"calls in the default group: (\d+) of ranks 0, 2, (?!\1)\d+ of rank 1"
DIFFER = "they do not make the same calls"
STALLS = {  # what is said of the ranks that wait, and a pattern of what follows
    # Ranks 0 and 2 wait for their devices, where the host first needs a number. PyTorch's counts tell in which call.
    "dataset": (
        f"Ranks 0, 2 wait in all_reduce ({line_of('gradient')})",
        rf"rank 1 is calling sleep at {line_of('asleep')}, __getitem__ \({BEHIND}\)",
    ),
    "barrier": (  # as many calls, but not the same
        f"Ranks 0, 2 wait in barrier ({line_of('the barrier')})",
        rf"rank 1 waits in all_reduce \({line_of('many')}\): {DIFFER} \(call \d+ of the default group: \w*barrier on r",
    ),
    "groups": (
        f"Ranks 1, 2 wait in all_gather ({line_of('groups')})",
        rf"rank 0 waits in all_reduce \({line_of('groups')}\): {DIFFER} \(calls in the group \S+: 2 of rank 0, 1 of r",
    ),
    "left_out": (
        f"Ranks 0-2 wait in all_reduce ({line_of('left out')}): they have not made the same calls",
        rf"same calls \({BEHIND}; calls in the group \S+: 3 of ranks 0, 2, 2 of rank 1\)",
    ),
}


@pytest.mark.parametrize("case", STALLS)
def test_the_rank_that_the_others_wait_for_is_named(case: str, tmp_path: Path) -> None:
    first, then = STALLS[case]
    output = tmp_path / "output.txt"
    command = torchrun(SCRIPT, case, tmp_path, processes=3)
    with started(*command, cwd=tmp_path, environment=variables(3), output=output) as job:
        wait_until(lambda: "All stacks are in" in output.read_text(encoding="utf-8") or ended(job), 80, "the message")
        text = output.read_text(encoding="utf-8")
    (message,) = [line for line in text.splitlines() if "All stacks are in" in line] or [text]
    assert first in message
    assert re.search(then, message), message


def ended(job: Any) -> bool:
    return all(process.poll() is not None for process in job.processes)
