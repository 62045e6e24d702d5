"""Sweeps: W&B's agents start jobs of two ranks, real processes against the stand-in for W&B's server."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from processes import python, run_job, started, torchrun, wait_until
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples" / "sweeps"
TORCHRUN = ("PYTHON", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AGENT = SCRIPTS / "sweep_agent.py"


def agent(parameters: dict[str, list[object]], *command: str | Path) -> list[str | Path]:
    """Return a command that creates a grid, and runs ``wandb agent`` on it."""
    given = json.dumps({name: {"values": values} for name, values in parameters.items()})
    return [sys.executable, AGENT, given, *command]


def test_a_trial_is_one_run_in_any_mode_with_its_values_on_all_ranks(wandb_server: WandbServer, tmp_path: Path) -> None:
    grid: dict[str, list[object]] = {"lr": [0.5], "run_mode": ["auto", "shared", "new"]}
    command = agent(grid, *TORCHRUN, SCRIPTS / "sweep_trial.py")
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
    command = agent({"launcher": [*codes], "lr": [0.5]}, "PYTHON", SCRIPTS / "sweep_launched.py")
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
        *python(SCRIPTS / "sweep_function.py", *codes),
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
    job = torchrun(SCRIPTS / "sweep_in_every_rank.py")
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
