"""The user's requests to W&B: in the arguments, else in the settings, else in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.runs.argument_checks import check_id
from dist_wandb.runs.client_settings import client_settings

Mode = Literal["online", "offline", "disabled"]
_BEYOND_INIT_TIMEOUT = 30.0  # seconds
# The setting and the variable of an argument.
_ELSEWHERE = {
    "project": ("project", "WANDB_PROJECT"),
    "entity": ("entity", "WANDB_ENTITY"),
    "group": ("run_group", "WANDB_RUN_GROUP"),
    "name": ("run_name", "WANDB_NAME"),
}
_WANDB_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def wanted_id(init_arguments: Mapping[str, Any]) -> str | None:
    """The run id the user asked for: the argument, else the settings, else `WANDB_RUN_ID`; `None` for none."""
    given = init_arguments.get("id") or user_setting(init_arguments, "run_id")
    given = _forked_id(init_arguments) if given is None else given
    if given is not None:
        return check_id(given, f"id={given!r}")
    in_environment = os.environ.get("WANDB_RUN_ID")
    return check_id(in_environment, f"WANDB_RUN_ID={in_environment!r}") if in_environment else None


def _forked_id(init_arguments: Mapping[str, Any]) -> str | None:
    """The run that `resume_from` names: W&B rewinds that run, so its id is this one's."""
    resume_from = init_arguments.get("resume_from")
    return str(resume_from).partition("?")[0] if resume_from else None


def wanted_resume(init_arguments: Mapping[str, Any]) -> str | None:
    """The resume mode that the user asked for: the argument, else the settings, else `WANDB_RESUME`; `None` for none.

    Returns:
        `"allow"`, `"must"`, `"never"` or `"auto"`; `True` means `"auto"` to W&B.
    """
    given = init_arguments.get("resume")
    if given is None:
        given = user_setting(init_arguments, "resume") or os.environ.get("WANDB_RESUME")
    return "auto" if given is True else str(given) if given else None


def sets_reinit(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the user sets `reinit`, which decides about a run that is already open."""
    given = init_arguments.get("reinit")
    if given is None:
        given = user_setting(init_arguments, "reinit") or os.environ.get("WANDB_REINIT")
    return given not in (None, "", "default")


def continues(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments allow W&B to resume a run."""
    return wanted_resume(init_arguments) in ("allow", "must", "auto")


def rewinds(init_arguments: Mapping[str, Any]) -> bool:
    """Whether the user asks W&B to rewind or fork a run, which excludes `resume`."""
    names = ("resume_from", "fork_from")
    return any(init_arguments.get(name) or user_setting(init_arguments, name) for name in names)


def wanted(init_arguments: Mapping[str, Any], name: str) -> str | None:
    """The value that the user requested: the argument, else the settings, else the variable; `None` for none.

    Args:
        init_arguments: Keyword arguments of `wandb.init`.
        name: `"project"`, `"entity"`, `"group"` or `"name"`.
    """
    setting, variable = _ELSEWHERE[name]
    value = init_arguments.get(name) or user_setting(init_arguments, setting) or os.environ.get(variable)
    return str(value) if value else None


def wanted_mode(init_arguments: Mapping[str, Any]) -> Mode:
    """Which W&B mode the user wants: the argument, else the settings, `WANDB_MODE`, or what ``wandb offline`` wrote.

    Raises:
        ConfigurationError: A mode W&B does not know, or an empty `WANDB_MODE`.
    """
    mode = init_arguments.get("mode") or user_setting(init_arguments, "mode") or _mode_outside()
    if mode not in _WANDB_MODES:
        raise ConfigurationError(f"The W&B mode {mode!r} is unknown. {suggest(mode, _WANDB_MODES)}")
    return _WANDB_MODES[mode]


def _mode_outside() -> str:
    if os.environ.get("WANDB_MODE") == "":
        raise ConfigurationError("WANDB_MODE is set but empty, which W&B refuses. Unset it, or set it to 'offline'.")
    return os.environ.get("WANDB_MODE") or str(client_settings().mode)


def user_setting(init_arguments: Mapping[str, Any], name: str) -> Any:
    """A value that the user put into `settings`; `None` for defaults of wandb's."""
    settings = init_arguments.get("settings")
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None) if name in settings.model_fields_set else None


def init_timeout(init_arguments: Mapping[str, Any]) -> float:
    """How long opening a run may take, in seconds: wandb's own limit, and the time that wandb needs to give up."""
    given = user_setting(init_arguments, "init_timeout") or client_settings().init_timeout
    return float(given) + _BEYOND_INIT_TIMEOUT


def set_offline() -> None:
    """Set `WANDB_MODE` to offline as Lightning's own logger does, for all runs that this process opens from now on."""
    os.environ["WANDB_MODE"] = "dryrun"
