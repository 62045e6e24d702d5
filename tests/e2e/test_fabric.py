"""Fabric never reports the end of a run. Runs are nevertheless complete, and have the exit code of the job."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from history import History, history_of, rank_of
from lightning.fabric import Fabric
from processes import python, run_job
from stored import ended_runs

from dist_wandb import DistWandbLogger, Limits
from dist_wandb.session import registry
from dist_wandb.settings.plan import RUN_MODES, check_choice
from dist_wandb.wandb_files.reading import StoredRun

X = "trainer/global_step"
STEPS = 4


def work(fabric: Fabric, how: str) -> None:
    model: Any = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        loss = model(torch.ones(2, 2)).mean()
        fabric.backward(loss)
        optimizer.step()
        fabric.log_dict({"loss": 10.0 * fabric.global_rank + step}, step=step)
    for logger in fabric.loggers:
        if isinstance(logger, DistWandbLogger):
            logger.log_hyperparams({"lr": 0.1, "seen_by": fabric.global_rank})
            logger.log_image("image", [np.full((2, 2, 3), fabric.global_rank, dtype=np.uint8)], step=STEPS)
    for session in registry.open_sessions():
        session.flush()  # a rank that fails does not wait for others
    fabric.barrier()
    if how == "raises" and fabric.global_rank == 1:
        raise RuntimeError("training failed")
    if how == "raises":
        time.sleep(60)  # no communication, so that only a signal ends this rank


def use_fabric(directory: str, strategy: str, *scenarios: str) -> None:
    """Each scenario is a run mode, and perhaps " raises"."""
    for scenario in scenarios:
        mode, _, how = scenario.partition(" ")
        place = Path(directory) / scenario.replace(" ", "-")
        logger = DistWandbLogger(
            save_dir=place,
            project="tests",
            id=mode,
            offline=True,
            run_mode=check_choice("run_mode", mode, RUN_MODES),
            limits=Limits(heartbeat=4.0),  # as `stored.PATIENT`
        )
        fabric = Fabric(accelerator="cpu", strategy=strategy, devices=2, loggers=[logger])
        launch: Any = fabric.launch  # its type knows functions without further arguments only
        is_last = scenario == scenarios[-1]
        with contextlib.nullcontext() if is_last else contextlib.suppress(Exception):
            launch(work, how)
        sys.stdout.write(f"\nAFTER {scenario}\n")


def runs_of(directory: Path, number: int, exit_code: int) -> dict[str, tuple[StoredRun, History]]:
    """Return the runs below a directory, by run id and rank (`exp/0`), and check that they ended as expected."""
    runs = {f"{run.run_id}/{rank_of(run)}": run for run in ended_runs(directory, number) if run.sidecar}
    runs |= {f"{run.run_id}/0": run for run in ended_runs(directory, number) if not run.sidecar}  # of a parent
    assert {name: run.exit_code for name, run in runs.items()} == dict.fromkeys(runs, exit_code)
    return {name: (run, history_of(run, X)) for name, run in runs.items()}


def check(found: tuple[StoredRun, History], mean: float, prefix: str = "") -> None:
    """Check the rows and the config of a run; `mean` is the mean over the ranks."""
    run, history = found
    assert history.last(f"{prefix}loss") == {step: 10.0 * mean + step for step in range(STEPS)}
    assert len(history.values(f"{prefix}loss")) == STEPS
    assert len(history.values(f"{prefix}image._type")) == (0 if prefix == "rank-0/" else 1)
    assert not history.is_flagged
    assert run.config["lr"] == 0.1


def check_auto(directory: Path, exit_code: int = 0) -> None:
    check(runs_of(directory, 1, exit_code)["auto/0"], 0.5)


def check_shared(directory: Path, exit_code: int) -> None:
    runs = runs_of(directory, 2, exit_code)
    check(runs["shared/0"], 0.5)
    check(runs["shared/0"], 0, "rank-0/")
    check(runs["shared/1"], 1, "rank-1/")


def check_new(directory: Path) -> None:
    runs = runs_of(directory, 2, 0)
    for rank in (0, 1):
        check(runs[f"new-rank-{rank}/{rank}"], rank)
        assert runs[f"new-rank-{rank}/{rank}"][0].config["seen_by"] == rank


def test_ddp_spawn_with_a_rank_that_raises(tmp_path: Path) -> None:
    """Its sibling gets SIGTERM, which only dist_wandb handles; the parent raises."""
    finished = run_job(*python(use_fabric, tmp_path, "ddp_spawn", "shared raises", "auto raises"), cwd=tmp_path)
    assert finished.exit_codes == (1,), finished.output
    assert finished.lines("AFTER") == ["AFTER shared raises"]
    assert "RuntimeError: training failed" in finished.output
    check_shared(tmp_path / "shared-raises", 1)
    check_auto(tmp_path / "auto-raises", 1)


def test_ddp_fork_in_consecutive_processes(tmp_path: Path) -> None:
    finished = run_job(*python(use_fabric, tmp_path, "ddp_fork", "auto raises", "auto", "new"), cwd=tmp_path).check()
    assert len(finished.lines("AFTER")) == 3
    check_auto(tmp_path / "auto-raises", 1)
    check_auto(tmp_path / "auto")
    check_new(tmp_path / "new")
