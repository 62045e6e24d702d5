"""Sweeps: W&B's agents start jobs of two ranks, real processes against the stand-in for W&B's server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import Finished, run_job
from wandb_server import WandbServer

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("PYTHON", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
AGENT = SCRIPTS / "sweep_agent.py"


def run_agent(
    server: WandbServer, directory: Path, parameters: dict[str, list[object]], *command: str | Path
) -> Finished:
    """Make a grid, and have ``wandb agent`` go through it."""
    given = json.dumps({name: {"values": values} for name, values in parameters.items()})
    agent: list[str | Path] = [sys.executable, AGENT, given, *command]
    finished = run_job(agent, cwd=directory, environment=server.environment(directory), timeout=240).check()
    assert server.unknown == []
    return finished


def test_a_trial_is_one_run_of_any_mode_with_its_values_on_all_ranks(wandb_server: WandbServer, tmp_path: Path) -> None:
    grid: dict[str, list[object]] = {"lr": [0.5, 0.25], "run_mode": ["auto", "shared", "new"]}
    finished = run_agent(wandb_server, tmp_path, grid, *TORCHRUN, SCRIPTS / "sweep_trial.py")
    trials = wandb_server.trials("sweep0")
    assert len(trials) == 6
    saw = []
    for trial in trials:
        mode, lr = trial.values["run_mode"], trial.values["lr"]
        ids = [trial.run_id, f"{trial.run_id}-rank-1" if mode == "new" else trial.run_id]
        config = {"lr": lr, "rank": 0, "run_mode": mode}
        saw += [f"SAW {rank} {run_id} {json.dumps(config)}" for rank, run_id in enumerate(ids)]
        run = wandb_server.run(trial.run_id)
        fails = lr == 0.25 and mode == "shared"
        assert (run.sweep, run.project, run.config) == ("sweep0", "digits", config)
        assert run.exit_codes == [int(fails)]
        losses = [row["loss"] for row in run.rows if "loss" in row]
        assert fails or losses == [lr if mode == "new" else 1.5 * lr] * 3
        if mode == "new":
            other = wandb_server.run(ids[1])
            assert (other.sweep, other.project, other.config, other.exit_codes) == (None, "digits", config, [0])
            assert other.group == run.group == trial.run_id
            assert [row["loss"] for row in other.rows] == [2 * lr] * 3
    assert finished.lines("SAW ") == sorted(saw)
    assert len(wandb_server.runs) == 8
    assert finished.output.count("id='mine', project='elsewhere' are not used") == 6
    assert finished.output.count("W&B takes one run for a trial") == 2
    assert "Ignoring" not in finished.output  # as W&B says of ids that the script did not pass
