"""How published scripts use Accelerate's trackers: one idiom after another in one job, mostly without a rank check."""

import sys
import time
import warnings
from typing import Any

import torch
import wandb
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

import dist_wandb
from dist_wandb import Limits
from dist_wandb.accelerate import DistWandbTracker

STEPS = 4  # optimizer steps
ACCUMULATED = 2  # batches of each


def accelerator_for(name: str, directory: str, finish_timeout: float | None = None, **more: Any) -> Accelerator:
    limits = Limits(heartbeat=4.0, finish_timeout=finish_timeout)
    return Accelerator(cpu=True, log_with=DistWandbTracker(id=name, dir=directory, limits=limits, **more))


def diffusers(directory: str) -> None:
    """As diffusers' scripts do: trackers initialised on the main process only, validation by tracker name."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATED,
        log_with=DistWandbTracker(id="diffusers", dir=directory, limits=Limits(heartbeat=4.0)),
    )
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    if accelerator.is_main_process:
        accelerator.init_trackers("tests", config={"lr": 0.0})
    step, train_loss = 0, 0.0
    for batch in range(STEPS * ACCUMULATED):
        with accelerator.accumulate(model):
            loss = (model(torch.ones(1, 1)) * 0).sum() + accelerator.process_index + batch
            train_loss += accelerator.gather(loss.detach().repeat(1)).mean().item() / ACCUMULATED
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"train_loss": train_loss}, step=step)
            train_loss = 0.0
            if accelerator.is_main_process:
                validate(accelerator, step)
        accelerator.log({"own": float(accelerator.process_index)}, step=batch)
    accelerator.wait_for_everyone()
    finish(accelerator)


def validate(accelerator: Accelerator, step: int) -> None:
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log({"validation": [wandb.Html(f"step {step}")], "score": 0.5}, step=step)
    assert accelerator.trackers[0].run is accelerator.trackers[0].tracker
    accelerator.get_tracker("wandb").log({"by_name": [step]}, step=step)


def main_alone(directory: str) -> None:
    """Everything under a rank check: the other rank skips this run and continues with the next one."""
    limit: dict[str, Any] = {"finish_timeout": 60} if "finish_timeout" in wandb.Settings.model_fields else {}
    upload = wandb.Settings(**limit)  # which would have as short a limit as the ranks, where W&B knows one
    accelerator = accelerator_for("main_alone", directory, finish_timeout=0.5, settings=upload)
    if accelerator.is_main_process:
        accelerator.init_trackers("tests")
        accelerator.log({"loss": 1.0}, step=1)
        finish(accelerator)
    accelerator.wait_for_everyone()


def megatron(directory: str) -> None:
    """With Megatron-LM the main process is the last one."""
    accelerator = accelerator_for("megatron", directory, run_mode="shared")
    state = PartialState()
    before, state.distributed_type = state.distributed_type, DistributedType.MEGATRON_LM
    assert accelerator.is_main_process is (accelerator.process_index == 1)
    if accelerator.is_main_process:
        accelerator.init_trackers("tests", config={"from": accelerator.process_index})
    for step in range(STEPS):
        accelerator.log({"loss": 2.0 * accelerator.process_index + step}, step=step)
    assert accelerator.get_tracker("wandb").session.config["from"] == 1
    finish(accelerator)
    state.distributed_type = before


def turns(directory: str) -> None:
    """`finish` under a rank check at the end of each turn: the other rank goes on to the next one."""
    accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(dir=directory, limits=Limits(heartbeat=0.5)))
    for turn in range(3):
        if accelerator.is_main_process:
            accelerator.init_trackers("tests", init_kwargs={"dist_wandb": {"id": f"turn-{turn}"}})
        assert accelerator.get_tracker("dist_wandb").session, "the other rank has joined, as it does in a longer turn"
        accelerator.log({"loss": 10.0 * turn + accelerator.process_index}, step=0)
        if accelerator.is_main_process:
            finish(accelerator)
        accelerator.wait_for_everyone()
    if not accelerator.is_main_process:
        until = time.monotonic() + 30
        while accelerator.get_tracker("dist_wandb").is_open and time.monotonic() < until:
            time.sleep(0.1)  # until this rank knows of the end
        accelerator.log({"loss": 0.0}, step=1)  # belongs to no run
    with warnings.catch_warnings(record=True) as caught:
        finish(accelerator)
    assert len(caught) == accelerator.process_index
    accelerator.wait_for_everyone()  # the row would belong to the next run if the main process opened that before


def ended(directory: str) -> None:
    """`end_training` immediately, without waiting for other ranks."""
    accelerator = accelerator_for("ended", directory)
    accelerator.init_trackers("tests")
    accelerator.log({"loss": float(accelerator.process_index)}, step=0)
    accelerator.end_training()
    run = accelerator.get_tracker("dist_wandb").tracker
    assert not accelerator.is_main_process or run.id == "ended"


def opened_before(directory: str) -> None:
    """The main process has opened a run by `init`, which the tracker uses there: the other rank takes part in it."""
    ways: Any = (("ours", dist_wandb.init, True), ("ours_main", dist_wandb.init, False), ("wandbs", wandb.init, True))
    for turn, (name, init, on_all) in enumerate(ways):
        accelerator = Accelerator(cpu=True, log_with=DistWandbTracker(dir=directory, limits=Limits(heartbeat=4.0)))
        if accelerator.is_main_process:
            init(id=name, dir=directory)
        if accelerator.is_main_process or on_all:
            accelerator.init_trackers("tests")
        accelerator.log({"loss": 10.0 * turn + accelerator.process_index}, step=0)
        finish(accelerator)
        assert wandb.run is None, "the tracker ends the run, as the stock tracker does"


def behind(directory: str) -> None:
    """A rank with a run of its own logs before the main process has started, and looks for its run after that ended."""
    for turn in range(2):
        tracker = DistWandbTracker(run_mode="new", id=f"behind-{turn}", dir=directory)
        accelerator = Accelerator(cpu=True, log_with=tracker)
        if accelerator.is_main_process:
            time.sleep(0.3)
            accelerator.init_trackers("tests")
        accelerator.log({"loss": 10.0 * turn + accelerator.process_index}, step=0)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            time.sleep(1.0)
        finish(accelerator)
    accelerator.wait_for_everyone()


def finish(accelerator: Accelerator) -> None:
    """End the trackers as `end_training` does, except for the process group."""
    accelerator.get_tracker("dist_wandb").finish()


def main(directory: str) -> None:
    for way in (diffusers, megatron, opened_before, main_alone, turns, behind, ended):
        way(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
