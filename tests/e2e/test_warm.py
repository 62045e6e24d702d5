"""The warm interpreter of the tests: to itself and to others, a fork is equivalent to a new interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm
from processes import clean_environment, run_job

SUPPORT = Path(__file__).parents[1] / "support"
REPORTS = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": globals().get("__file__"), "path": sys.path, "flags": list(sys.flags),
    "directory": os.getcwd(), "environment": dict(os.environ), "parent": os.getppid(), "umask": os.umask(0),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "prefix": [sys.prefix, sys.base_prefix, sys.version], "input": sys.stdin.read(),
    "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.write_through)
        for s in (sys.stdin, sys.stdout, sys.stderr)],
    "main": sorted(sys.modules["__main__"].__dict__), "limits": __import__("resource").getrlimit(7),
    "processors": sorted(os.sched_getaffinity(0)), "dist_wandb": "dist_wandb" in sys.modules,
}))
"""


@pytest.fixture
def python() -> str:
    """The stand-in."""
    found = warm.interpreter(clean_environment())
    assert found != sys.executable, "no server is available"
    return found


@pytest.fixture
def reports(tmp_path: Path) -> str:
    script = tmp_path / "reports.py"
    script.write_text(REPORTS)
    return str(script)


def reported(command: Sequence[str], tmp_path: Path, **options: Any) -> dict[str, Any]:
    done = subprocess.run(
        command,
        cwd=tmp_path,
        input="standard input",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["-u", "SCRIPT", "a", "", "b c", "-x"], {"LOCAL_RANK": "1", "TMPDIR": "elsewhere"}),
        (["-m", "reports", "a"], {"PYTHONPATH": "here::/there/../and", "PYTHONUNBUFFERED": ""}),
    ],
    ids=["script", "module"],
)
def test_a_fork_reports_the_same_as_a_new_interpreter(
    python: str, reports: str, tmp_path: Path, words: list[str], variables: dict[str, str]
) -> None:
    command = [reports if word == "SCRIPT" else word for word in words]
    read, write = os.pipe()
    environment = {**clean_environment(), "PYTHONFAULTHANDLER": "", **variables}  # it precedes Python's handlers

    def prepare() -> None:
        os.umask(0o027)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    forked, new = (
        reported([each, *command], tmp_path, env=environment, pass_fds=[write], preexec_fn=prepare)
        for each in (python, sys.executable)
    )
    os.close(read)
    os.close(write)
    for facts in (forked, new):
        facts["environment"].pop("LC_CTYPE", None)
    assert forked == new
    assert forked["parent"] == os.getpid()


def test_variables_of_whole_jobs_do_not_start_a_cold_interpreter(python: str, tmp_path: Path) -> None:
    """A library that reads one of these on import, or such a module, would make nearly all starts cold."""
    variables = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:1", "WANDB_API_KEY": "0" * 40}
    variables |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    variables |= {"SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1", "WANDB_RUN_ID": "exp", "WANDB_SWEEP_ID": "sweep"}
    variables |= {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "GFORTRAN_UNBUFFERED_PRECONNECTED": "y"}
    (tmp_path / "__main__.py").touch()
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    job = (python, tmp_path / "script.py")
    done = run_job(job, cwd=tmp_path, environment=clean_environment(**variables), timeout=60).check()
    assert done.output.strip() == "True"
