"""Accelerate as published scripts use it, by each of its launchers: the data that reaches the server."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from accelerate import Accelerator, PartialState, debug_launcher, notebook_launcher
from accelerate.utils import DistributedType
from processes import free_port, python, run_job, words_of
from wandb_records import column
from wandb_server import WandbServer

import dist_wandb
from dist_wandb import Limits
from dist_wandb.accelerate import DistWandbTracker

STEPS = 4
BEHIND = {f"behind-{turn}-rank-{rank}": {0: 10.0 * turn + rank} for turn in (0, 1) for rank in (0, 1)}
OPENED_BEFORE = ("ours", "ours_main", "wandbs")
DEGRADED = "dist_wandb/degraded"
ACCUMULATED = 2  # batches of each


def train(directory: str, name: str) -> None:
    tracker = DistWandbTracker(id=name, dir=directory, run_mode="shared")  # which needs the layout over nodes
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("tests")
    rank = accelerator.process_index
    for step in range(STEPS):
        accelerator.log({"loss": 10.0 * rank + step}, step=step)
    accelerator.wait_for_everyone()
    topology = tracker.session.topology
    seen = f"{name} rank {rank} of {topology.world_size} on {topology.num_nodes} node"
    (Path(directory) / f"saw-{name}-{rank}").write_text(seen)


def launch_functions(directory: str) -> None:
    """One training without `end_training`, by each of Accelerate's launchers of functions."""
    debug_launcher(train, (directory, "debug"), num_processes=2)
    os.environ["ACCELERATE_USE_CPU"] = "yes"
    notebook_launcher(train, (directory, "notebook"), num_processes=2, use_port=str(free_port()))


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


def use_idioms(directory: str) -> None:
    """Use Accelerate's trackers as published scripts do, one idiom after the other, mostly without a rank check."""
    for way in (diffusers, megatron, opened_before, main_alone, turns, behind, ended):
        way(directory)


def run(server: WandbServer, directory: Path, *commands: list[str | Path]) -> None:
    run_job(*commands, cwd=directory, environment=server.environment(directory, WANDB_CONSOLE="wrap")).check()


@pytest.fixture(scope="module")
def idioms(tmp_path_factory: pytest.TempPathFactory) -> WandbServer:
    """Return the runs of a job of two ranks by `accelerate launch` that executes all idioms."""
    directory = tmp_path_factory.mktemp("idioms")
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, f"--main_process_port={free_port()}"]
    with WandbServer() as server:
        run(server, directory, [*launch, *words_of(use_idioms, directory)])
    assert server.unknown == []
    return server


def test_every_idiom_gives_one_successful_run_with_the_numbers_of_the_ranks_that_take_part(idioms: WandbServer) -> None:
    codes = {key.rpartition("/")[2]: recorded.exit_codes for key, recorded in idioms.runs.items()}
    losses = {
        "main_alone": {1: 1.0},
        **dict(zip(OPENED_BEFORE, ({0: 0.5}, {0: 10.5}, {0: 20.5}), strict=True)),
        **{f"turn-{turn}": {0: 10.0 * turn + 0.5} for turn in range(3)},
        **BEHIND,
        "ended": {0: 0.5},
    }
    assert codes == {name: [0] for name in ("diffusers", "megatron", *losses)}
    assert {name: column(idioms.run(name), "loss") for name in losses} == losses
    assert [name for name in codes if column(idioms.run(name), DEGRADED)] == []


def test_trackers_initialised_on_the_main_process_only_and_found_by_name_cover_all_ranks(idioms: WandbServer) -> None:
    recorded = idioms.run("diffusers")
    assert column(recorded, "train_loss") == {1: 1.0, 2: 3.0, 3: 5.0, 4: 7.0}  # gathered already: equal on all ranks
    assert column(recorded, "own") == dict.fromkeys(range(2 * STEPS), 0.5)
    assert sum("train_loss" in row for row in recorded.rows) in (
        STEPS,
        STEPS + 1,
    )  # the first row is written twice if a rank joins late
    steps = range(1, STEPS + 1)
    shown = column(recorded, "validation")
    assert {step: (shown[step]["_type"], shown[step]["count"]) for step in shown} == dict.fromkeys(steps, ("html", 1))
    assert column(recorded, "score") == dict.fromkeys(steps, 0.5)
    assert column(recorded, "by_name") == {step: [step] for step in steps}


def test_with_megatron_the_last_rank_is_the_primary(idioms: WandbServer) -> None:
    recorded = idioms.run("megatron")
    assert recorded.config == {"from": 1}
    of_primary, of_other = sorted(recorded.writers.values(), key=lambda writer: "loss" not in writer.rows[0])
    assert [row["loss"] for row in of_primary.rows] == [step + 1.0 for step in range(STEPS)]
    assert {"rank-1/loss" in row for row in of_primary.rows} == {True}
    assert [row["rank-0/loss"] for row in of_other.rows] == [float(step) for step in range(STEPS)]
    assert (of_primary.completions, of_other.completions) == (1, 0)


def test_runs_are_complete_without_end_training_in_launched_functions(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    run(wandb_server, tmp_path, *python(launch_functions, tmp_path))
    for name in ("debug", "notebook"):
        recorded = wandb_server.run(name)
        assert recorded.exit_codes == [0]
        assert column(recorded, "loss") == {step: step + 5.0 for step in range(STEPS)}
        for rank in (0, 1):
            assert column(recorded, f"rank-{rank}/loss") == {step: 10.0 * rank + step for step in range(STEPS)}
            assert (tmp_path / f"saw-{name}-{rank}").read_text() == f"{name} rank {rank} of 2 on 1 node"
