"""What the user requests from W&B: by the arguments, else by the settings, else by the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from dist_wandb.errors import ConfigurationError, suggest
from dist_wandb.runs.argument_checks import check_id
from dist_wandb.runs.client_settings import client_settings

Mode = Literal["online", "offline", "disabled"]
_BEYOND_INIT_TIMEOUT = 30.0  # seconds
# Setting and environment variable by argument.
_SOURCES = {
    "project": ("project", "WANDB_PROJECT"),
    "entity": ("entity", "WANDB_ENTITY"),
    "group": ("run_group", "WANDB_RUN_GROUP"),
    "name": ("run_name", "WANDB_NAME"),
}
_REINIT_BEFORE = {"true": "finish_previous", "false": "return_previous"}
_WANDB_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def run_id(init_arguments: Mapping[str, Any]) -> str | None:
    """Return the requested run id: from the arguments, else the settings, else `WANDB_RUN_ID`; `None` for none."""
    given = init_arguments.get("id") or user_setting(init_arguments, "run_id")
    if given is None and init_arguments.get("resume_from"):  # W&B rewinds that run, so the opened run has its id
        given = str(init_arguments["resume_from"]).partition("?")[0]
    if given is not None:
        return check_id(given, f"id={given!r}")
    in_environment = os.environ.get("WANDB_RUN_ID")
    return check_id(in_environment, f"WANDB_RUN_ID={in_environment!r}") if in_environment else None


def resume(init_arguments: Mapping[str, Any]) -> str | None:
    """Return the requested resume mode: from the arguments, else the settings, else `WANDB_RESUME`; `None` for none.

    It is `"allow"`, `"must"`, `"never"` or `"auto"`; for W&B, `True` means `"auto"`.
    """
    given = init_arguments.get("resume")
    if given is None:
        given = user_setting(init_arguments, "resume") or os.environ.get("WANDB_RESUME")
    return "auto" if given is True else str(given) if given else None


def reinit(init_arguments: Mapping[str, Any]) -> str:
    """Return what `init` is to do while a run is open: wandb's `reinit`, with its older values by their new names.

    It is ``"default"``, ``"return_previous"``, ``"finish_previous"`` or ``"create_new"``.
    """
    given = init_arguments.get("reinit")
    if given is None:
        given = user_setting(init_arguments, "reinit")
    if given is None:
        given = os.environ.get("WANDB_REINIT") or "default"
    return _REINIT_BEFORE.get(str(given).lower(), str(given))


def continues(init_arguments: Mapping[str, Any]) -> bool:
    """Return whether the arguments allow W&B to resume a run."""
    return resume(init_arguments) in ("allow", "must", "auto")


def rewinds(init_arguments: Mapping[str, Any]) -> bool:
    """Return whether the user asks W&B to rewind or fork a run, which excludes `resume`."""
    return _branch_point(init_arguments) is not None


def first_step(init_arguments: Mapping[str, Any]) -> int:
    """Return W&B's first step after the point at which the user asks to rewind or fork a run; 0 for neither."""
    point = _branch_point(init_arguments)  # "RUN?_step=5", or an object of wandb
    step = str(getattr(point, "value", point)).rpartition("=")[2]
    return 0 if point is None else int(float(step)) + 1


def _branch_point(init_arguments: Mapping[str, Any]) -> Any:
    given = (init_arguments.get(name) or user_setting(init_arguments, name) for name in ("resume_from", "fork_from"))
    return next(filter(None, given), None)


def value(init_arguments: Mapping[str, Any], name: str) -> str | None:
    """Return a requested value (a key of `_SOURCES`): from the arguments, else the settings, else the environment."""
    setting, variable = _SOURCES[name]
    found = init_arguments.get(name) or user_setting(init_arguments, setting) or os.environ.get(variable)
    return str(found) if found else None


def naming(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requested values, by argument, that tell runs apart."""
    given = {"id": run_id(init_arguments), **{name: value(init_arguments, name) for name in _SOURCES}}
    given.update({name: init_arguments.get(name) for name in ("job_type", "tags")})
    return {name: one for name, one in given.items() if one is not None}


def mode_if_given(init_arguments: Mapping[str, Any]) -> Mode | None:
    """Return the W&B mode of the arguments, the settings or `WANDB_MODE`; `None` for none, or an unknown one."""
    given = init_arguments.get("mode") or user_setting(init_arguments, "mode") or os.environ.get("WANDB_MODE")
    return _WANDB_MODES.get(str(given))


def mode(init_arguments: Mapping[str, Any]) -> Mode:
    """Return the requested W&B mode: from the arguments, else the settings, `WANDB_MODE`, or ``wandb offline``.

    Raises `ConfigurationError` for a mode that W&B does not know, or an empty `WANDB_MODE`.
    """
    in_environment = os.environ.get("WANDB_MODE")
    found = init_arguments.get("mode") or user_setting(init_arguments, "mode") or in_environment
    if not found and in_environment is not None:
        raise ConfigurationError("WANDB_MODE is set but empty, which W&B refuses. Unset it, or set it to 'offline'.")
    found = found or str(client_settings().mode)
    if found not in _WANDB_MODES:
        raise ConfigurationError(f"The W&B mode {found!r} is unknown. {suggest(found, _WANDB_MODES)}")
    return _WANDB_MODES[found]


def user_setting(init_arguments: Mapping[str, Any], name: str) -> Any:
    """Return a value that the user has set in `settings`; `None` for a default of wandb."""
    settings = init_arguments.get("settings")
    if settings is None:
        return None
    if isinstance(settings, Mapping):
        return settings.get(name)
    return getattr(settings, name, None) if name in getattr(settings, "model_fields_set", ()) else None


def check_writers(init_arguments: Mapping[str, Any], run_mode: str, ranks: int) -> str | None:
    """Check W&B's own settings for several writers of a run, which `run_mode` sets on every rank.

    Returns the user's label of a writer, which is replaced. Raises `ConfigurationError` if several ranks ask W&B, but
    not this package, for a run that all of them write into.
    """
    if ranks == 1:
        return None
    if user_setting(init_arguments, "mode") == "shared" and run_mode != "shared":
        raise ConfigurationError(
            f"settings has mode='shared', which is W&B's switch for one writer, but {ranks} ranks open the run with "
            f"run_mode={run_mode!r}. Pass run_mode='shared' instead: it sets W&B's mode, labels and primary on every "
            "rank."
        )
    return user_setting(init_arguments, "x_label") if run_mode == "shared" else None


def init_timeout(init_arguments: Mapping[str, Any]) -> float:
    """Return how long opening a run may take, in seconds: wandb's limit plus the time that wandb needs to give up."""
    given = user_setting(init_arguments, "init_timeout") or client_settings().init_timeout
    return float(given) + _BEYOND_INIT_TIMEOUT


def set_offline() -> None:
    """Set `WANDB_MODE` to offline, as Lightning's own logger does, for all runs opened later in this process."""
    os.environ["WANDB_MODE"] = "dryrun"
