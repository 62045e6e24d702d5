"""Two ranks train with a DataLoader whose worker processes also use the session."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from stored import PATIENT
from torch.utils.data import DataLoader, Dataset

import dist_wandb
from dist_wandb import Session


class Logging(Dataset[torch.Tensor]):
    """A dataset whose items log in the worker that creates them."""

    def __init__(self, run: Session) -> None:
        self.run = run

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.run.log({"in_worker": 3.0})
        self.run.log({"by_index": float(index)}, step=index)
        if index >= 6:  # the last one of each of two workers
            assert self.run.flush()
            self.run.finish()  # ends nothing here
        return torch.tensor([float(index)])


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with dist_wandb.init(
        "tests", id="exp", dir=str(Path(directory)), limits=dist_wandb.Limits(heartbeat=PATIENT)
    ) as run:
        run.log({"before": 1.0})
        data = DataLoader(Logging(run), num_workers=2, multiprocessing_context="fork")
        for epoch in range(2):
            for index, batch in enumerate(data):
                dist.all_reduce(batch)
                assert batch.item() == 2.0 * index
                run.log({"loss": 2.0 * index + rank}, step=8 * epoch + index)
        run.log({"after": 1.0})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
