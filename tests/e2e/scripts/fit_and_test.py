"""Lightning: fit, then test, in one mode and scope."""

import os
import sys

import torch
import wandb
from lightning.pytorch import LightningModule, Trainer
from stored import PATIENT, ROWS
from torch.utils.data import DataLoader, TensorDataset

from dist_wandb import DistWandbLogger, Limits
from dist_wandb.settings.plan import RankScope, RunMode


class Model(LightningModule):
    def __init__(self, *, uses_wandb: bool = False) -> None:
        super().__init__()
        self.uses_wandb = uses_wandb
        self.layer = torch.nn.Linear(2, 1)

    def setup(self, stage: str) -> None:  # noqa: ARG002  # Lightning passes it
        assert self.trainer.state.fn is not None
        assert isinstance(self.logger, DistWandbLogger)
        experiment = self.logger.experiment
        sys.stdout.write(
            f"{self.trainer.state.fn.value} rank {self.global_rank} run {bool(experiment)} id {self.logger.version}\n"
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("loss", 10.0 * self.global_rank + batch_idx)
        if self.uses_wandb:
            assert (wandb.run is None) is (self.global_rank > 0)
            wandb.log({"by_wandb": float(self.global_rank)})
        result: torch.Tensor = self.layer(batch[0]).mean()
        return result

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # noqa: ARG002  # Lightning passes it
        self.log("tested", 10.0 * self.global_rank + len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(directory: str, strategy: str, run_mode: RunMode, rank_scope: RankScope, num_nodes: str = "1") -> None:
    data = DataLoader(TensorDataset(torch.ones(2 * int(num_nodes) * ROWS, 2)))
    logger = DistWandbLogger(
        name="nm",
        save_dir=directory,
        id="exp",
        project="tests",
        offline=os.environ.get("WANDB_MODE") == "offline",
        run_mode=run_mode,
        rank_scope=rank_scope,
        limits=Limits(heartbeat=PATIENT),
    )
    logger.log_hyperparams({"lr": 0.1})
    is_fork = strategy == "ddp_fork"
    if is_fork:
        _ = logger.experiment  # a run that the forked ranks inherit
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=2,
        num_nodes=int(num_nodes),
        max_epochs=1,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model(uses_wandb=is_fork)
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    logger.experiment.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # the test passes modes and scopes
