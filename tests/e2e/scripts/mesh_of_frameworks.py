"""A Lightning or Accelerate script of four ranks with a mesh of 2 x 2."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

os.environ["WANDB_MODE"] = "offline"


def with_lightning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_trainers import quiet_trainer

    from dist_wandb.lightning import DistWandbLogger

    class Model(pl.LightningModule):
        def configure_model(self) -> None:
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            self.log("loss", 10.0**self.global_rank)
            loss: torch.Tensor = self.layer(batch).sum()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

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


{"lightning": with_lightning, "accelerate": with_accelerate}[sys.argv[1]]()
if dist.is_initialized():
    dist.destroy_process_group()
