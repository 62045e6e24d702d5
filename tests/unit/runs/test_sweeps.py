"""Trials of a sweep: the agent's decisions, arguments of the script without effect, and further runs of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb
from opened_runs import FIRST, SECOND, SINGLE, opened_by

from dist_wandb.errors import ConfigurationError
from dist_wandb.job.topology import Topology
from dist_wandb.runs import sweeps
from dist_wandb.settings.plan import plan_run

AGENT = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": "t7", "WANDB_PROJECT": "digits", "WANDB_ENTITY": "team"}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, fresh_wandb: Path) -> Path:
    """The variables of an agent, and the file with the values of its trial."""
    values = fresh_wandb / "config-t7.yaml"
    values.write_text("wandb_version: 1\n\nlr:\n  value: 0.5\n")
    for name, value in {**AGENT, "WANDB_SWEEP_PARAM_PATH": str(values), "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    return fresh_wandb


@pytest.mark.usefixtures("bare_environment")
def test_without_an_agent_the_scripts_arguments_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"id": "mine", "project": "elsewhere"}
    monkeypatch.setenv("WANDB_RUN_ID", "t7")
    for sweep in (None, ""):
        if sweep is not None:
            monkeypatch.setenv("WANDB_SWEEP_ID", sweep)
        assert (sweeps.is_trial(), sweeps.trial_id()) == (False, None)
        assert sweeps.trial_arguments(given) is given
        assert sweeps.unused_arguments(given) is None


@pytest.mark.usefixtures("agent")
def test_in_a_trial_the_agents_id_project_and_entity_apply() -> None:
    given = {"id": "mine", "project": "elsewhere", "entity": "team", "name": "night"}
    used = {"id": "t7", "project": "digits", "entity": "team", "name": "night"}
    assert (sweeps.is_trial(), sweeps.trial_id()) == (True, "t7")
    assert sweeps.trial_arguments(given) == used
    assert sweeps.unused_arguments(used) is None
    assert sweeps.unused_arguments({}) is None
    assert sweeps.unused_arguments(given) == (
        "An agent of the sweep 's1' has started this job, and the agent determines the run: id='mine', "
        "project='elsewhere' are not used, but WANDB_RUN_ID=t7, WANDB_PROJECT=digits."
    )
    of_settings = {"settings": wandb.Settings(run_id="mine")}
    assert "id='mine' is not used, but WANDB_RUN_ID=t7." in str(sweeps.unused_arguments(of_settings))


def test_without_the_agents_project_the_scripts_has_no_effect_either(
    agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert agent.exists()
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_ID"):
        monkeypatch.delenv(name)
    given = {"id": "mine", "project": "elsewhere"}
    assert sweeps.trial_arguments(given) == {"id": "mine"}  # W&B ignores the project, too; all ranks need the id
    assert str(sweeps.unused_arguments(given)).endswith("project='elsewhere' is not used.")


@pytest.mark.usefixtures("agent")
def test_an_invalid_id_from_the_agent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "a/b")
    with pytest.raises(ConfigurationError, match="WANDB_RUN_ID='a/b' has '/'"):
        sweeps.trial_arguments({})


@pytest.mark.parametrize(
    ("topology", "mode", "agents_id", "run_id", "sweep"),
    [
        (SINGLE, "auto", "t7", "t7", "s1"),
        (FIRST, "auto", "t7", "t7", "s1"),
        (FIRST, "new", "t7", "t7", "s1"),
        (SECOND, "new", "t7", "t7-rank-1", None),
        (FIRST, "auto", None, "mine", "s1"),  # an agent that sets no id
    ],
)
def test_wandb_opens_the_run_that_was_planned(
    topology: Topology,
    mode: str,
    agents_id: str | None,
    run_id: str,
    sweep: str | None,
    agent: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert agent.exists()
    monkeypatch.delenv("WANDB_SILENT")
    if agents_id is None:
        monkeypatch.delenv("WANDB_RUN_ID")
    arguments = sweeps.trial_arguments({"id": "mine", "project": "elsewhere", "config": {"lr": 7.0, "width": 3}})
    plan = plan_run(topology, mode, "global", arguments["id"], in_sweep=sweeps.is_trial())
    run: Any = opened_by(plan, topology, arguments)
    try:
        assert (run.id, run.sweep_id, run.project, run.entity) == (run_id, sweep, "digits", "team")
        assert dict(run.config) == {"lr": 0.5, "width": 3}
        settings: Any = wandb.setup().settings
        assert (settings.sweep_id, settings.run_id) == ("s1", agents_id)  # as before
        assert "Ignoring" not in capsys.readouterr().err
    finally:
        run.finish()


@pytest.mark.parametrize("is_set_up", [False, True])
def test_a_rank_opens_its_run_without_the_file_of_values_if_its_node_lacks_it(agent: Path, is_set_up: bool) -> None:
    wandb.teardown()
    if is_set_up:
        wandb.setup()
    (agent / "config-t7.yaml").unlink()
    sweeps.forget_missing_values()
    arguments = {"config": {"lr": 7.0}, "mode": "offline"}
    run: Any = opened_by(plan_run(SECOND, "new", "global", "t7", in_sweep=True), SECOND, arguments)
    assert run.id == "t7-rank-1"
    assert is_set_up or dict(run.config) == {"lr": 7.0}  # otherwise older versions have already read the file
    run.finish()
