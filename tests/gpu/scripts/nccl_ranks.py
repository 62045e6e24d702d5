"""Ranks whose default group is NCCL's. Arguments: a case, the directory, and `cpu` to try it with gloo on the CPU."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dist_wandb

ROWS, STEPS = 200, 20
LIMIT = 6.0  # seconds
FAR = 600  # seconds: longer than any job of a test
LIMITS = {"heartbeat": 0.5, "peer_timeout": 10, "join_timeout": 60, "finish_timeout": 20}
cuda: Any = torch.cuda  # not all of it has types


def main(case: str, directory: str, kind: str = "cuda") -> None:
    """Connect the ranks, train some steps, and do what the case does."""
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % cuda.device_count())
        cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False, device=device))
    torch.nn.init.zeros_(model.module.weight)
    for _ in range(3):
        train(model)
    timeout = None if case in ("ddp", "late") else LIMIT
    session = dist_wandb.init("gpu", mode="offline", dir=directory, stall_timeout=timeout, limits=LIMITS)
    for step in range(ROWS if case == "ddp" else STEPS):
        loss = train(model)
        gradient = model.module.weight.grad
        assert gradient is not None
        session.log({"loss": loss, "gradient": gradient[0, 0]}, step=step)
        with torch.no_grad():
            model.module.weight -= gradient / 8
    CASES[case](session, model, device)
    session.finish()
    dist.destroy_process_group()


def train(model: Any) -> torch.Tensor:
    """Train one step, without waiting for the device; the gradient is the mean of the ranks' numbers, from 1 on."""
    model.zero_grad()
    weight = model.module.weight
    loss: torch.Tensor = model(torch.full((1, 1), dist.get_rank() + 1.0, device=weight.device)).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    return loss.detach()


# --- what does not stand still ----------------------------------------------------------------------------------------


def ddp(*_: Any) -> None:
    """Do no more."""


def late(session: dist_wandb.Session, _: Any, device: torch.device) -> None:
    """Rank 0 logs the result of a collective that the others join later."""

    def log(total: torch.Tensor, step: int) -> None:
        session.log({"total": total, "again": total, "other": total.expand(3).double().mean()}, step=step)

    log(torch.ones(1, device=device), STEPS)  # CUDA loads a kernel when it is first used, and waits for the device then
    assert session.flush()
    dist.barrier()
    if dist.get_rank() != 0:
        time.sleep(3)
    total, begun = torch.ones(1, device=device), time.perf_counter()
    dist.all_reduce(total)
    log(total, STEPS + 1)
    took, is_over = time.perf_counter() - begun, device.type == "cpu" or cuda.current_stream().query()
    sys.stdout.write(f"rank {dist.get_rank()} logged in {took:.3f} s, the collective was over: {is_over}\n")
    total.item()


def dies(session: dist_wandb.Session, model: Any, _: Any) -> None:
    """Rank 1 dies; the others would wait for it."""
    assert session.flush()
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(7)
    train(model).item()
    model.module.weight.grad.item()  # of the gradient, which never comes


# --- what stands still ------------------------------------------------------------------------------------------------


class Sleepy:
    """A data set of which an item never comes."""

    def __getitem__(self, index: int) -> float:
        time.sleep(FAR)  # asleep
        return float(index)


def dataset(_: Any, model: Any, __: Any) -> None:
    """Rank 1 sleeps in its data set."""
    if dist.get_rank() == 1:
        Sleepy()[0]
    train(model)
    model.module.weight.grad.item()  # gradient


def barrier(_: Any, __: Any, device: torch.device) -> None:
    if dist.get_rank() != 1:
        dist.barrier()  # the barrier
    many = torch.ones(1 << 22, device=device)
    dist.all_reduce(many)
    many.sum().item()  # many


def groups(_: Any, __: Any, device: torch.device) -> None:
    """Rank 0 makes a call in one group, the others another one in another group."""
    one, other = (connected(device) for _ in range(2))
    ones = torch.ones(1, device=device)
    if dist.get_rank() == 0:
        dist.all_reduce(ones, group=one)
    else:
        dist.all_gather([torch.ones(1, device=device) for _ in range(dist.get_world_size())], ones, group=other)
    cuda.synchronize() if device.type == "cuda" else None  # groups


def left_out(_: Any, __: Any, device: torch.device) -> None:
    """Rank 1 leaves out a call in another group."""
    other = connected(device)
    for turn in range(3):
        for group in (other, None):
            if not (turn == 1 and group is other and dist.get_rank() == 1):
                ones = torch.ones(1, device=device)
                dist.all_reduce(ones, group=group)
                ones.item()  # left out


def connected(device: torch.device) -> Any:
    """Return a new group of all ranks that has communicated."""
    group = dist.new_group([*range(dist.get_world_size())])
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=group)
    ones.item()
    return group


# --- frameworks -------------------------------------------------------------------------------------------------------


def lightning(directory: str, kind: str = "cuda") -> None:
    """Lightning's Trainer: `devices` on each of `num_nodes`."""
    from lightning import LightningModule, Trainer

    from dist_wandb import DistWandbLogger

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            self.log("loss", self.layer(batch).sum().detach() * 0 + self.global_rank + index)
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    local, size = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    logger = DistWandbLogger(save_dir=directory, offline=True, limits=LIMITS)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    where: dict[str, Any] = {"accelerator": kind, "devices": local, "num_nodes": size // local, "strategy": "ddp"}
    trainer = Trainer(max_steps=STEPS, log_every_n_steps=1, logger=logger, **where, **quiet)
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(size * STEPS, 1)))  # type: ignore[arg-type]
    assert trainer.strategy.root_device.type == kind


def accelerate(directory: str, kind: str = "cuda") -> None:
    """Accelerate, which trains on its devices by itself."""
    from accelerate import Accelerator

    from dist_wandb import DistWandbTracker

    tracker = DistWandbTracker(mode="offline", dir=directory, limits=LIMITS)
    accelerator = Accelerator(cpu=kind == "cpu", log_with=tracker)
    accelerator.init_trackers("gpu")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for step in range(STEPS):
        loss = model(torch.ones(1, 1, device=accelerator.device)).sum()
        accelerator.backward(loss)
        accelerator.log({"loss": loss.detach() * 0 + accelerator.process_index + step}, step=step)
    assert accelerator.device.type == kind
    accelerator.end_training()


FRAMEWORKS: dict[str, Callable[..., None]] = {one.__name__: one for one in (lightning, accelerate)}
CASES: dict[str, Callable[[Any, Any, torch.device], None]] = {
    one.__name__: one for one in (ddp, late, dies, dataset, barrier, groups, left_out)
}

if __name__ == "__main__":
    FRAMEWORKS[sys.argv[1]](*sys.argv[2:]) if sys.argv[1] in FRAMEWORKS else main(*sys.argv[1:])
