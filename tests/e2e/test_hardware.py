"""The hardware metrics of all nodes in one run online. For all modes and scopes see test_launchers.py."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist
import wandb
from arrived import label_of, rows_of
from processes import run_job, torchrun
from stored import PATIENT
from wandb_server import WandbServer

import dist_wandb


def measure_nodes(directory: str) -> None:
    """One rank of several nodes that logs into one run, which also has the hardware metrics of all nodes."""
    dist.init_process_group("gloo")
    settings = wandb.Settings(x_stats_sampling_interval=1)
    with dist_wandb.init(
        "tests",
        id="exp",
        dir=directory,
        system_metrics="all-nodes",
        limits=dist_wandb.Limits(heartbeat=PATIENT),
        settings=settings,
        config={"lr": 0.1},
    ) as run:
        assert bool(run.run) == (dist.get_rank() == 0)
        assert bool(wandb.run) == (dist.get_rank() == 0)
        for step in range(4):
            run.log({"loss": 2.0 * step + dist.get_rank()}, step=step)
            time.sleep(1)
        sys.stdout.write(f"hello from {dist.get_rank()}\n")
    dist.destroy_process_group()


def test_one_run_has_the_hardware_metrics_of_all_nodes_and_no_series_of_ranks(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    job = torchrun(measure_nodes, tmp_path, processes=2, nodes=2)
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
