"""Runs of several writers online are complete at every start. For all modes and scopes see test_launchers.py."""

from __future__ import annotations

from pathlib import Path

from arrived import label_of, rows_of
from processes import python, run_job, torchrun
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
STARTS = 3
OTHERS = [(rank, step) for rank in (1, 2, 3) for step in range(5)]


def test_a_shared_run_is_complete_at_every_start(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = python(SCRIPTS / "shared_starts.py", tmp_path, STARTS)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    assert finished.lines("CODES ") == ["CODES [0, 0, 0, 0]"] * STARTS, finished.output
    assert len(wandb_server.runs) == STARTS
    mean = {step: {"global_step": step, "loss": step + 1.5, "rank-0/loss": float(step)} for step in range(5)}
    own = {(rank, step): {"global_step": step, f"rank-{rank}/loss": float(step + rank)} for rank, step in OTHERS}
    expected = sorted(sorted(row.items()) for row in (*mean.values(), *own.values()))
    for run in wandb_server.runs.values():
        assert (len(run.writers), run.exit_codes) == (4, [0])
        rows = [row for writer in run.writers.values() for row in rows_of(writer)]
        assert sorted(sorted(row.items()) for row in rows) == expected


def test_one_run_has_the_hardware_metrics_of_all_nodes_and_no_series_of_ranks(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    job = torchrun(SCRIPTS / "hardware.py", tmp_path, processes=2, nodes=2)
    run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path, WANDB_CONSOLE="wrap")).check()
    run = wandb_server.run("exp")
    assert (len(run.writers), run.exit_codes, run.config) == (2, [0], {"lr": 0.1})
    labels = {label_of(writer): writer for writer in run.writers.values()}
    assert labels.keys() == {"worker-0", "worker-1"}
    assert rows_of(labels["worker-0"]) == [{"loss": 2.0 * step + 1.5, "global_step": step} for step in range(4)]
    assert rows_of(labels["worker-1"]) == []
    for label, writer in labels.items():
        names = {name for event in writer.events for name in event if name.startswith("system.")}
        assert names
        assert all(name.endswith(f"/l:{label}") for name in names)
