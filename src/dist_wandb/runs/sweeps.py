"""Trials of W&B's sweeps: the arguments determined by the agent, and further runs of the job.

An agent publishes its sweep and its trial in the environment (``WANDB_SWEEP_ID``, ``WANDB_RUN_ID``, project and
entity), and the trial's values in a file. In such a process W&B ignores the id, project and entity passed by a script:
every run would be the trial. Therefore none of them is passed for the trial, and any other run of the job (of another
rank in `new`, or of another node) is opened while wandb's settings name no sweep. It still has the trial's values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dist_wandb.runs import wandb_private
from dist_wandb.runs.requested import check_id, in_code, in_environment
from dist_wandb.settings.plan import RunPlan

_OF_AGENT = ("id", "project", "entity")  # arguments that the agent determines
_VALUES = "WANDB_SWEEP_PARAM_PATH"


def is_trial() -> bool:
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def trial_id() -> str | None:
    name, found = in_environment("id") if is_trial() else ("", None)
    return check_id(found, f"{name}={found!r}") if found else None


def trial_arguments(init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if not is_trial():
        return init_arguments
    values = {name: in_environment(name)[1] for name in _OF_AGENT}
    values["id"] = trial_id() or init_arguments.get("id")
    others = {name: value for name, value in init_arguments.items() if name not in values}
    return {**others, **{name: value for name, value in values.items() if value}}


def forget_missing_values() -> None:
    # W&B would raise if this node lacks it. The coordinator publishes the values.
    path = os.environ.get(_VALUES)
    if path and is_trial() and not Path(path).exists():
        del os.environ[_VALUES]


def values() -> dict[str, Any]:
    # This node may lack the agent's file.
    path = os.environ.get(_VALUES)
    return wandb_private.values_in(path) if path and is_trial() else {}


def unused_arguments(init_arguments: Mapping[str, Any]) -> str | None:
    actual = trial_arguments(init_arguments)
    requested = {name: in_code(init_arguments, name) for name in _OF_AGENT}
    unused = [name for name, value in requested.items() if value and value != actual.get(name)]
    if not is_trial() or not unused:
        return None
    asked = ", ".join(f"{name}={requested[name]!r}" for name in unused)
    used = ", ".join(f"{in_environment(name)[0]}={actual[name]}" for name in unused if name in actual)
    sweep = os.environ["WANDB_SWEEP_ID"]
    return (
        f"An agent of the sweep {sweep!r} has started this job, and the agent determines the run: {asked} "
        f"{'is' if len(unused) == 1 else 'are'} not used{f', but {used}' if used else ''}."
    )


@contextmanager
def planned(arguments: Mapping[str, Any], plan: RunPlan) -> Iterator[Mapping[str, Any]]:
    """Make `wandb.init` open the planned run, even if an agent's variables name another one; yield its arguments."""
    if not is_trial():
        yield arguments
        return
    import wandb

    settings: Any = wandb.setup().settings
    name, value = ("run_id", arguments.get("id")) if plan.is_trial else ("sweep_id", None)
    before = getattr(settings, name)
    if _VALUES not in os.environ:  # it may have been set when wandb read its settings
        settings.sweep_param_path = None
    setattr(settings, name, value or None)
    try:
        yield {key: item for key, item in arguments.items() if not plan.is_trial or key not in _OF_AGENT}
    finally:
        setattr(settings, name, before)
