"""Model-parallel training, as whole jobs: the example, and the meshes of Lightning and Accelerate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from history import histories, history
from processes import clean_environment, run_job, torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "patterns" / "meshes.py"


def with_lightning() -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_trainers import Layer, quiet_trainer

    from dist_wandb.lightning import DistWandbLogger

    class Model(Layer):
        def configure_model(self) -> None:  # the strategy asks for it
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # type: ignore[override]
            self.log("loss", 10.0**self.global_rank)
            return super().training_step([batch], batch_idx)

    mesh = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2, process_group_backend="gloo")
    logger = DistWandbLogger(project="mesh")
    quiet_trainer(logger, devices=4, strategy=mesh, max_steps=3).fit(Model(), torch.ones(8, 4, 2))


def with_accelerate() -> None:
    from accelerate import Accelerator
    from torch.distributed.device_mesh import init_device_mesh

    from dist_wandb.accelerate import DistWandbTracker

    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker())
    # as `Accelerator(parallelism_config=ParallelismConfig(...))` sets it, which is refused on CPUs
    accelerator.state.device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    accelerator.init_trackers("mesh")
    for step in range(3):
        accelerator.log({"loss": 10.0**accelerator.process_index}, step=step)
    accelerator.end_training()


def train_on_mesh(framework: str) -> None:
    """A Lightning or Accelerate script of four ranks with a mesh of 2 x 2."""
    {"lightning": with_lightning, "accelerate": with_accelerate}[framework]()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("example", "writers", "primary", "steps"), [("tensor", (0, 2), 0, 29), ("pipeline", (2, 3), 3, 28)]
)
def test_each_replica_of_a_model_counts_once(
    example: str, writers: tuple[int, int], primary: int, steps: int, tmp_path: Path
) -> None:
    """Four ranks: two replicas of two parts or stages each. The last stage of a pipeline has the loss."""
    environment = clean_environment(DIST_WANDB_RUN_MODE="shared")
    finished = run_job(*torchrun(EXAMPLE, example, processes=4), cwd=tmp_path, environment=environment).check()
    assert "written by ranks {}, {}".format(*writers) in finished.output
    found = histories(tmp_path, 2)
    assert sorted(found) == [*writers]
    own = [found[rank].last(f"rank-{rank}/loss") for rank in writers]
    losses = found[primary].last("loss")
    assert len(losses) == steps
    for step in range(28):  # a last batch is smaller, and its sizes are the weights
        assert losses[step] == pytest.approx((own[0][step] + own[1][step]) / 2)
    assert losses[steps - 1] < losses[0]
    assert not found[primary].is_flagged


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_the_mesh_of_a_framework_is_detected(framework: str, tmp_path: Path) -> None:
    """Four ranks, two replicas in two parts: rank r logs 10 ** r, and no unit is passed."""
    run_job(*torchrun(train_on_mesh, framework, processes=4), cwd=tmp_path).check()
    found = history(tmp_path)
    assert set(found.values("loss")) == {50.5}  # of ranks 0 and 2
