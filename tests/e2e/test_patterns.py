"""The patterns people know, as whole jobs: decorated functions, children of ranks, other ways to train in parallel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from history import DEGRADED, history, history_of
from processes import Finished, clean_environment, free_port, run_job, torchrun
from stored import ended_runs
from wandb_records import RecordedRun
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
PATTERNS = EXAMPLES / "patterns"
STEPS = 29  # batches of a rank in an epoch of the examples, for two ranks
MEANS = {step: 2.0 * step + 0.5 for step in range(3)}

Outcome = tuple[Finished, WandbServer]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """One job of two ranks that goes through all scenarios."""
    directory = tmp_path_factory.mktemp("patterns")
    with WandbServer() as server:
        environment = server.environment(directory, PYTHONPATH=str(PATTERNS), WANDB_RUN_GROUP="night")
        job = torchrun(SCRIPTS / "patterns.py", directory, PATTERNS, processes=1, nodes=2)
        finished = run_job(*job, cwd=directory, environment=environment, timeout=240).check()
    assert not server.unknown
    return finished, server


def column(run: RecordedRun, name: str) -> dict[int, float]:
    return {row["global_step"]: row[name] for row in run.rows if name in row}


def named(server: WandbServer, name: str) -> RecordedRun:
    (run,) = [run for run in server.runs.values() if run.display_name == name]
    return run


def said(finished: Finished) -> list[str]:
    return [line.removeprefix("SAW ") for line in finished.lines("SAW ")]


def test_show(outcome):
    finished, server = outcome
    for key, run in server.runs.items():
        print(key, run.display_name, run.group, run.exit_codes, run.completions, len(run.writers), len(run.rows))
        names = {n for r in run.rows for n in r if not n.startswith("_")} - {"global_step"}
        for n in sorted(names):
            print("   ", n, {k: (round(v, 3) if isinstance(v, float) else v) for k, v in column(run, n).items()})
    print(finished.output)
    assert 0
