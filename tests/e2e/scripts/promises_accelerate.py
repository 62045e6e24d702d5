"""Accelerate as published scripts use it: trackers are started on the main process only, and used on all."""

import sys

import torch
from accelerate import Accelerator
from history import STEPS

from dist_wandb.accelerate import DistWandbTracker


def main(directory: str) -> None:
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(dir=directory, id="exp"))
    rank = accelerator.process_index
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(layer, optimizer)
    if accelerator.is_main_process:
        accelerator.init_trackers("tests", config={"lr": 0.1})
    for step in range(STEPS):
        output = model(torch.full((1, 1), 2.0 * rank + step))
        accelerator.backward(output.sum())
        assert layer.weight.grad is not None
        assert layer.weight.grad.item() == 1.0 + step  # the mean over ranks, separate from the logged values
        accelerator.log({"train_loss": 2.0 * step + rank, "lr": 0.1}, step=step)
        if step % 3 == 0 and accelerator.is_main_process:
            for tracker in accelerator.trackers:
                tracker.log({"validation": float(step)}, step=step)
        gathered = accelerator.gather(torch.tensor([float(10**rank)]))
        assert gathered.tolist() == [1.0, 10.0]
        optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
