"""Sweeps: W&B's agents start jobs of two ranks, real processes against the stand-in for W&B's server."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import wandb
import yaml  # type: ignore[import-untyped]
from processes import python, run_job, started, torchrun, wait_until, words_of
from wandb.agents import pyagent
from wandb_server import WandbServer

import dist_wandb

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples" / "sweeps"
TORCHRUN = ("PYTHON", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AGENT = SCRIPTS / "sweep_agent.py"
AT_LEAST = 120.0  # seconds: a trial that is not stopped ends successfully, which is not expected


def saw(rank: int, run: Any) -> None:
    sys.stdout.write(f"\nSAW {rank} {run.id} lr={run.config['lr']}\n")


def with_torch() -> None:
    dist.init_process_group("gloo")
    with dist_wandb.init("digits", run_mode="shared", config={"lr": 7.0}) as run:
        saw(dist.get_rank(), run)
        begin = time.monotonic()
        while time.monotonic() - begin < AT_LEAST:
            run.log({"loss": 0.5})
            time.sleep(0.1)


def with_lightning() -> None:
    import lightning
    import torch
    from lightning_trainers import trainer_of_two

    from dist_wandb import DistWandbLogger

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.begin = time.monotonic()
            self.automatic_optimization = False

        def configure_model(self) -> None:
            saw(self.global_rank, logger.experiment)
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor) -> None:
            time.sleep(0.1)
            self.log("loss", self.layer(batch).mean())  # Lightning may hang where SIGTERM meets a rank in backward
            seconds = time.monotonic() - self.begin
            # Lightning 2.6 loses a SIGTERM that arrives while it asks rank 0 for one, and then trains on alone.
            if self.global_rank and seconds > AT_LEAST / 2:
                raise TimeoutError
            if seconds > AT_LEAST:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=logger.experiment.config["lr"])

    logger: Any = DistWandbLogger(project="digits", config={"lr": 7.0})
    batches: Any = torch.ones(1000, 1)
    trainer_of_two(logger, max_epochs=-1).fit(Model(), torch.utils.data.DataLoader(batches))


def launch_trial(*arguments: str) -> None:
    """A trial of a sweep that trains until it is stopped: it starts its own launcher, as the trial specifies."""
    launcher = dict(argument.lstrip("-").split("=") for argument in arguments)["launcher"]
    if launcher == "torchrun" and "RANK" not in os.environ:
        words = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", *sys.argv]
        os.execv(sys.executable, [sys.executable, "-m", *words])  # noqa: S606
    {"torchrun": with_torch, "lightning": with_lightning}[launcher]()


def call_agent_everywhere() -> None:
    """Two ranks that call `dist_wandb.agent`, each for itself."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def trial() -> None:
        with dist_wandb.init(project="digits") as run:
            run.log({"loss": run.config["lr"] + rank})

    sweep = {"method": "grid", "parameters": {"lr": {"values": [0.5, 0.25]}}}
    box = [dist_wandb.sweep(sweep, project="digits") if rank == 0 else None]
    dist.broadcast_object_list(box)
    try:
        dist_wandb.agent(str(box[0]), trial, count=2, project="digits")
    except dist_wandb.errors.ConfigurationError as error:
        sys.stdout.write(f"\nREFUSED {error}\n")
    dist.barrier()
    os._exit(0)


def log_trial(*arguments: str) -> None:
    """A trial of a sweep on one rank: it prints the trial's values that it sees, and logs rows that depend on them."""
    given: Any = dict(argument.lstrip("-").split("=") for argument in arguments)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with dist_wandb.init("elsewhere", run_mode=given["run_mode"], id="mine", config={"lr": 7.0, "rank": 0}) as run:
        sys.stdout.write(f"\nSAW {rank} {run.id} {json.dumps(dict(run.config), sort_keys=True)}\n")
        for step in range(3):
            run.log({"loss": run.config["lr"] * (1 + rank)}, step=step)
        run.flush(together=True)
        dist.barrier()
        if given["run_mode"] == "shared":
            raise ArithmeticError
    dist.destroy_process_group()


def trial() -> None:
    """A trial that succeeds, is never finished, fails, or is stopped."""
    run = dist_wandb.init("digits", config={"lr": 7.0})
    end = run.config["end"]
    sys.stdout.write(f"\nSAW {run.id} {end} lr={run.config['lr']}\n")
    run.log({"loss": 0.5})
    if end == "fails":
        raise ArithmeticError
    begin = time.monotonic()
    while end == "stopped" and time.monotonic() - begin < AT_LEAST:
        run.log({"loss": 0.5})
        time.sleep(0.1)
    if end == "finished":
        run.finish()


def call_agent(*ends: str) -> None:
    """``wandb.agent`` in Python, which calls a function in a thread of this process for each trial."""
    agent: Any = pyagent.Agent
    agent.HEARTBEAT_SLEEP_SECONDS = 0.2  # of 5
    config = {"method": "grid", "parameters": {"end": {"values": [*ends]}, "lr": {"values": [0.5]}}}
    sweep = wandb.sweep(config, project="digits")
    wandb.agent(sweep, trial, project="digits", count=len(ends))


def agent(parameters: dict[str, list[object]], *command: str | Path) -> list[str | Path]:
    """Return a command that creates a grid, and runs ``wandb agent`` on it."""
    given = json.dumps({name: {"values": values} for name, values in parameters.items()})
    return [sys.executable, AGENT, given, *command]


def test_a_trial_is_one_run_in_any_mode_with_its_values_on_all_ranks(wandb_server: WandbServer, tmp_path: Path) -> None:
    grid: dict[str, list[object]] = {"lr": [0.5], "run_mode": ["auto", "shared", "new"]}
    command = agent(grid, *TORCHRUN, *words_of(log_trial))
    finished = run_job(command, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    trials = wandb_server.trials("sweep0")
    assert len(trials) == 3
    saw = []
    for trial in trials:
        mode = trial.values["run_mode"]
        ids = [trial.run_id, f"{trial.run_id}-rank-1" if mode == "new" else trial.run_id]
        config = {"lr": 0.5, "rank": 0, "run_mode": mode}
        saw += [f"SAW {rank} {run_id} {json.dumps(config)}" for rank, run_id in enumerate(ids)]
        run = wandb_server.run(trial.run_id)
        assert (run.sweep, run.project, run.config) == ("sweep0", "digits", config)
        assert run.exit_codes == [int(mode == "shared")]  # this trial fails
        assert [row["loss"] for row in run.rows if "loss" in row] == [0.5 if mode == "new" else 0.75] * 3
        if mode == "new":
            other = wandb_server.run(ids[1])
            assert (other.sweep, other.project, other.config, other.exit_codes) == (None, "digits", config, [0])
            assert other.group == run.group == trial.run_id
            assert [row["loss"] for row in other.rows] == [1.0] * 3
    assert finished.lines("SAW ") == sorted(saw)
    assert len(wandb_server.runs) == 4
    assert finished.output.count("id='mine', project='elsewhere' are not used") == 3
    assert finished.output.count("W&B accepts one run as a trial") == 1
    assert "Ignoring" not in finished.output  # W&B's warning about ids


def test_an_early_stop_reaches_all_ranks_and_ends_the_trial_once(wandb_server: WandbServer, tmp_path: Path) -> None:
    codes = {"torchrun": 143, "lightning": 1}  # Lightning raises an exception
    log = tmp_path / "output.txt"
    command = agent({"launcher": [*codes], "lr": [0.5]}, "PYTHON", *words_of(launch_trial))
    environment = wandb_server.environment(
        tmp_path, WANDB_AGENT_DISABLE_FLAPPING="true"
    )  # otherwise it gives up after 3 failures
    with started(command, cwd=tmp_path, environment=environment, output=log) as job:
        for number in range(len(codes)):
            wandb_server.wait_until(partial(logs, wandb_server, f"sweep0t{number}"), within=120)
            wandb_server.stop_trial("sweep0", number)
            wandb_server.wait_until(partial(has_ended, wandb_server, number), within=60)
        assert job.processes[0].wait(60) == 0
        wait_until(lambda: not job.living(), 120, "the end of all processes of a stopped trial")
    output = log.read_text()
    assert len(wandb_server.runs) == len(codes)
    for number, code in enumerate(codes.values()):
        run = wandb_server.run(f"sweep0t{number}")
        assert (run.sweep, run.completions, run.exit_codes) == ("sweep0", 1, [code]), output
        for rank in range(2):
            assert f"\nSAW {rank} sweep0t{number} lr=0.5\n" in output


def test_a_function_called_by_wandbs_agent_is_a_trial_with_its_exit_code(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    codes = {"unfinished": 0, "fails": 1, "stopped": 1, "finished": 0}  # stopped by an exception in its thread
    stopped = list(codes).index("stopped")
    log = tmp_path / "output.txt"
    with started(
        *python(call_agent, *codes),
        cwd=tmp_path,
        environment=wandb_server.environment(tmp_path),
        output=log,
    ) as job:
        wandb_server.wait_until(partial(logs, wandb_server, f"sweep0t{stopped}"), within=120)
        wandb_server.stop_trial("sweep0", stopped)
        assert job.processes[0].wait(60) == 0
        wait_until(lambda: not job.living(), 60, "the end of all processes of a stopped trial")
    output = log.read_text()
    assert len(wandb_server.runs) == len(codes)
    for number, (end, code) in enumerate(codes.items()):
        run = wandb_server.run(f"sweep0t{number}")
        assert (run.sweep, run.completions, run.exit_codes) == ("sweep0", 1, [code]), output
        assert run.config == {"end": end, "lr": 0.5}
        assert f"\nSAW sweep0t{number} {end} lr=0.5\n" in output


def logs(server: WandbServer, run_id: str) -> bool:
    """Return whether a trial has logged rows with numbers of its ranks."""
    return any(
        run.run_id == run_id and any({"loss", "train/loss"} & row.keys() for row in run.rows)
        for run in server.runs.values()
    )


def has_ended(server: WandbServer, number: int) -> bool:
    """Return whether the agent has detected the end of a trial's process."""
    return server.trials("sweep0")[number].has_ended


def test_agents_in_every_rank_are_refused_before_they_take_a_trial(wandb_server: WandbServer, tmp_path: Path) -> None:
    job = torchrun(call_agent_everywhere)
    finished = run_job(*job, cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    refused = finished.lines("REFUSED ")
    assert [line.split(", and")[0] for line in refused] == [
        f"REFUSED wandb.agent was called on rank {rank} of 2" for rank in range(2)
    ]
    assert all("run: wandb agent SWEEP" in line for line in refused)
    assert ({trial.agent for trial in wandb_server.trials("sweep0")}, wandb_server.runs) == ({""}, {})


def test_the_example_is_a_sweep_of_jobs_with_one_run_each(wandb_server: WandbServer, tmp_path: Path) -> None:
    sweep = yaml.safe_load((EXAMPLES / "sweep.yaml").read_text())
    assert sweep["program"] == "examples/sweeps/train_digits.py"
    words = {"${env}": [], "${interpreter}": ["PYTHON"], "${program}": [str(EXAMPLES / "train_digits.py")]}
    command = [word for given in sweep["command"] for word in words.get(given, [given])]
    parameters = {"lr": sweep["parameters"]["lr"]["values"][:1], "epochs": [1]}
    run_job(agent(parameters, *command), cwd=tmp_path, environment=wandb_server.environment(tmp_path)).check()
    run = wandb_server.run("sweep0t0")
    assert (run.sweep, run.exit_codes, run.config) == ("sweep0", [0], {"lr": 0.03, "epochs": 1, "width": 32})
    losses = [row["loss"] for row in run.rows]
    assert len(losses) == 15
    assert losses[-1] < losses[0]
