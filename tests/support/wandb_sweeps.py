"""Sweeps of the stand-in for W&B's server: their grids, their agents, and the commands sent to agents.

wandb 0.31 and 0.19 use `UpsertSweep` (``wandb.sweep``), `SweepWithRuns` and `CreateAgent` (an agent starts), and
`Heartbeat`, by which an agent reports its running trials, and receives its next commands.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml  # type: ignore[import-untyped]  # also used by wandb itself
from wandb_records import ENTITY, PROJECT

_Data = dict[str, Any]


@dataclass
class Trial:
    """One trial: a run that does not exist until an agent has opened it."""

    run_id: str  # id that the server generated for its run
    values: dict[str, Any]  # values of the sweep's parameters
    agent: str = ""  # the agent that runs it; empty before any does
    is_stopped: bool = False  # whether its agent should stop it
    has_ended: bool = False  # whether its agent has reported that it no longer runs


@dataclass
class RecordedSweep:
    """A sweep over a grid."""

    name: str  # id of the sweep, as users write it
    config: dict[str, Any]  # the config passed to ``wandb.sweep``
    project: str = PROJECT
    trials: list[Trial] = field(default_factory=list)  # all points of the grid, the last parameter varying fastest

    def __post_init__(self) -> None:
        parameters = self.config["parameters"]
        axes = [item["values"] if "values" in item else [item["value"]] for item in parameters.values()]
        for number, point in enumerate(itertools.product(*axes)):
            self.trials.append(Trial(f"{self.name}t{number}", dict(zip(parameters, point, strict=True))))


class SweepQueries:
    """Answers the operations of agents, and those that create sweeps."""

    def __init__(self) -> None:
        self.sweeps: dict[str, RecordedSweep] = {}
        self._agents: dict[str, RecordedSweep] = {}
        self.answers: dict[str, Callable[[Mapping[str, Any], str], _Data]] = {
            "UpsertSweep": self._upsert_sweep,
            "SweepWithRuns": self._sweep_with_runs,
            "CreateAgent": self._create_agent,
            "Heartbeat": self._heartbeat,
        }

    def add(self, config: Mapping[str, Any], project: str = PROJECT) -> RecordedSweep:
        """Create a sweep over a grid."""
        sweep = RecordedSweep(f"sweep{len(self.sweeps)}", dict(config), project)
        self.sweeps[sweep.name] = sweep
        return sweep

    def is_stopped(self, run_id: str) -> bool:
        """Return whether a run is a trial that should be stopped; its own client is informed as well."""
        return any(
            trial.is_stopped for sweep in self.sweeps.values() for trial in sweep.trials if trial.run_id == run_id
        )

    def _upsert_sweep(self, variables: Mapping[str, Any], _client: str) -> _Data:
        sweep = self.add(yaml.safe_load(variables["config"]), variables.get("projectName") or PROJECT)
        entity = {"id": ENTITY, "name": ENTITY}
        project = {"id": sweep.project, "name": sweep.project, "entity": entity}
        return {"upsertSweep": {"sweep": {"name": sweep.name, "project": project}, "configValidationWarnings": []}}

    def _sweep_with_runs(self, variables: Mapping[str, Any], _client: str) -> _Data:
        sweep = self.sweeps[variables["sweep"]]
        about = {"id": sweep.name, "name": sweep.name, "method": "grid", "state": "RUNNING", "runs": {"edges": []}}
        return {"project": {"sweep": {**about, "config": yaml.safe_dump(sweep.config)}}}

    def _create_agent(self, variables: Mapping[str, Any], _client: str) -> _Data:
        name = f"agent-{len(self._agents)}"
        self._agents[name] = self.sweeps[variables["sweep"]]
        return {"createAgent": {"agent": {"id": name}}}

    def _heartbeat(self, variables: Mapping[str, Any], _client: str) -> _Data:
        name, running = variables["id"], json.loads(variables["runState"])
        commands = self._commands(name, running)
        return {"agentHeartbeat": {"agent": {"id": name}, "commands": json.dumps(commands)}}

    def _commands(self, agent: str, running: Mapping[str, bool]) -> list[_Data]:
        """Stop trials that should be stopped; if none runs, start the next one; if none is left, end the agent."""
        sweep = self._agents[agent]
        mine = [trial for trial in sweep.trials if trial.agent == agent and not trial.has_ended]
        for trial in mine:
            trial.has_ended = trial.run_id not in running
        remaining = [trial for trial in mine if not trial.has_ended]
        if remaining:
            return [{"type": "stop", "run_id": trial.run_id} for trial in remaining if trial.is_stopped]
        following = next((trial for trial in sweep.trials if not trial.agent), None)
        if following is None:
            return [{"type": "exit"}]
        following.agent = agent
        values = {name: {"value": value} for name, value in following.values.items()}
        run = {"type": "run", "run_id": following.run_id, "args": values, "program": sweep.config.get("program")}
        return [run]
