"""The hardware metrics of all nodes in one run online. For all modes and scopes see test_launchers.py."""

from __future__ import annotations

from pathlib import Path

from arrived import label_of, rows_of
from processes import run_job, torchrun
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"


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
