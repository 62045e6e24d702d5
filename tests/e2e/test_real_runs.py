"""Runs that are opened before or after others usually are, with real processes and wandb, offline.

For all modes see test_hosts.py and test_launchers.py, for Lightning on two nodes test_patterns.py, with other
strategies test_lightning_everything.py and test_lightning_online.py, with an early use test_lightning_folds.py.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from history import history_of
from lightning_trainers import Layer, samples, trainer_of_two
from processes import python, run_job, torchrun
from stored import PATIENT, ended_runs

import dist_wandb
import dist_wandb as wandb
from dist_wandb import DistWandbLogger, Limits

PAUSE = 2.0  # seconds; longer than the ranks wait for one that opens no session


def meet_late(directory: str) -> None:
    """Under torchrun, rank 0 opens its run before there is a process group, the others after."""
    comes_early = os.environ["RANK"] == "0"
    if not comes_early:
        dist.init_process_group("gloo")
    run = dist_wandb.init("tests", run_mode="shared", dir=directory, limits=dist_wandb.Limits(join_timeout=40))
    if comes_early:
        dist.init_process_group("gloo")
    sys.stdout.write(f"\nSAW {run.id}\n")
    dist.barrier()
    run.finish()
    dist.destroy_process_group()


class Model(Layer):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            time.sleep(PAUSE)
        self.log("rank", float(self.global_rank))
        return super().training_step(batch, batch_idx)


def init_before_fit(directory: str) -> None:
    """Use wandb's idiom: `init` before the Trainer has started its processes; then its logger reuses the run."""
    limits: Any = Limits(heartbeat=PATIENT, join_timeout=1.0)
    run = wandb.init(project="tests", config={"width": 3}, dir=directory, mode="offline", limits=limits)
    model = Model(outputs=wandb.config["width"])
    trainer = trainer_of_two(DistWandbLogger(checkpoint_name=f"model-{run.id}"))
    trainer.fit(model, samples(6))
    wandb.log({"after": trainer.global_rank + 1})
    wandb.finish()
    assert wandb.run is None, "finish has left the run open"


def test_ranks_share_a_run_before_and_after_their_process_group(tmp_path: Path) -> None:
    finished = run_job(*torchrun(meet_late, tmp_path), cwd=tmp_path).check()
    (run_id,) = {stored.run_id for stored in ended_runs(tmp_path, 2)}
    assert finished.lines("SAW ") == [f"SAW {run_id}"] * 2


def test_lightning_after_an_init_before_fit_has_that_run_alone(tmp_path: Path) -> None:
    finished = run_job(*python(init_before_fit, tmp_path), cwd=tmp_path).check()
    (stored,) = ended_runs(tmp_path, 1)
    history = history_of(stored, "trainer/global_step")
    assert (history.values("rank"), history.values("after")) == ([0.5] * 3, [1.5])
    assert (stored.config["width"], history.is_flagged) == (3, False)
    assert "Traceback" not in finished.output
    assert not [line for line in finished.lines("dist_wandb: ") if "run_mode=auto" not in line]
