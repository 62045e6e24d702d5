"""Trials of W&B's sweeps: what the agent that started this job decides, and runs beside the trial.

An agent names its sweep and its trial in the environment (``WANDB_SWEEP_ID``, ``WANDB_RUN_ID``, project and entity),
and the trial's values in a file. In such a process W&B ignores the id, project and entity that a script passes: every
run would be the trial. So the trial gets none of them, and a run beside it (another rank's in `new`, another node's) is
opened while wandb's settings name no sweep. It has the trial's values all the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_wandb.runs.argument_checks import check_id
from dist_wandb.runs.requested import user_setting

if TYPE_CHECKING:
    from dist_wandb.settings.plan import RunPlan

_OF_THE_AGENT = {
    "id": ("run_id", "WANDB_RUN_ID"),
    "project": ("project", "WANDB_PROJECT"),
    "entity": ("entity", "WANDB_ENTITY"),
}
"""By argument its setting and the agent's variable."""
_VALUES = "WANDB_SWEEP_PARAM_PATH"


def is_trial() -> bool:
    """Whether an agent of a sweep has started this job."""
    return bool(os.environ.get("WANDB_SWEEP_ID"))


def trial_id() -> str | None:
    """The run id that the agent has given to its trial; `None` without an agent."""
    given = os.environ.get("WANDB_RUN_ID") if is_trial() else None
    return check_id(given, f"WANDB_RUN_ID={given!r}") if given else None


def of_trial(init_arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of `wandb.init` with the agent's id, project and entity, where an agent has started this job.

    Without an id of the agent's that of the script holds.
    """
    if not is_trial():
        return init_arguments
    values = {name: os.environ.get(variable) for name, (_, variable) in _OF_THE_AGENT.items()}
    values["id"] = trial_id() or init_arguments.get("id")
    others = {name: value for name, value in init_arguments.items() if name not in values}
    return {**others, **{name: value for name, value in values.items() if value}}


def forget_missing_values() -> None:
    """Do without the file of the trial's values, on a rank that is not the coordinator, if its node does not have it.

    W&B's client raises an error without the file. This rank's config gets the values that the coordinator publishes.
    """
    path = os.environ.get(_VALUES)
    if path and is_trial() and not Path(path).exists():
        del os.environ[_VALUES]


def not_kept(init_arguments: Mapping[str, Any]) -> str | None:
    """Which of the script's arguments do not hold in a trial, for a warning; `None` if all do."""
    now = of_trial(init_arguments)
    settings = {name: user_setting(init_arguments, setting) for name, (setting, _) in _OF_THE_AGENT.items()}
    asked = {name: init_arguments.get(name) or value for name, value in settings.items()}
    lost = [name for name, value in asked.items() if value and value != now.get(name)]
    if not is_trial() or not lost:
        return None
    given = ", ".join(f"{name}={asked[name]!r}" for name in lost)
    held = ", ".join(f"{_OF_THE_AGENT[name][1]}={now[name]}" for name in lost if name in now)
    sweep = os.environ["WANDB_SWEEP_ID"]
    return (
        f"An agent of the sweep {sweep!r} has started this job, and the agent determines the run: {given} "
        f"{'is' if len(lost) == 1 else 'are'} not used{f', but {held}' if held else ''}."
    )


@contextmanager
def planned(arguments: Mapping[str, Any], plan: RunPlan) -> Iterator[Mapping[str, Any]]:
    """Have `wandb.init` open the planned run where an agent's variables would decide otherwise.

    Args:
        arguments: The arguments of `wandb.init`.
        plan: What this rank does.

    Yields:
        The arguments to call it with.
    """
    if not is_trial():
        yield arguments
        return
    import wandb

    settings: Any = wandb.setup().settings
    name, value = ("run_id", arguments.get("id")) if plan.is_trial else ("sweep_id", None)
    before = getattr(settings, name)
    if _VALUES not in os.environ:  # it may have been there when wandb read its settings
        settings.sweep_param_path = None
    setattr(settings, name, value or None)
    try:
        yield {key: item for key, item in arguments.items() if not plan.is_trial or key not in _OF_THE_AGENT}
    finally:
        setattr(settings, name, before)
