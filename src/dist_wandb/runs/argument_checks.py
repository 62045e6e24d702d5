"""Checks of the arguments of `wandb.init`, before anything is started."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dist_wandb.errors import ConfigurationError
from dist_wandb.settings.config_values import plain
from dist_wandb.settings.limits import LIMIT_NAMES
from dist_wandb.settings.options import OPTION_NAMES

# W&B's client refuses the first seven; its documentation adds the backslash and the percent sign.
_FORBIDDEN_IN_IDS = ":;,#?/'\\%"
_LONGEST_ID = 128  # characters. W&B documents this limit only for names
_LONGEST_ID_IN_BYTES = 192  # W&B puts the id into file names, which may have 255 bytes
_SHOWN_OF_AN_ORIGIN = 200
# Arguments of wandb.init in every supported version. For any other argument, wandb is imported to read its signature.
_COMMON_INIT_ARGUMENTS = frozenset(
    {
        *("entity", "project", "dir", "id", "name", "notes", "tags", "group", "job_type"),
        *("config", "config_exclude_keys", "config_include_keys", "allow_val_change"),
        *("mode", "force", "reinit", "resume", "resume_from", "fork_from", "anonymous", "settings"),
        *("save_code", "tensorboard", "sync_tensorboard", "monitor_gym"),
    }
)
_ALERT_LEVELS = ("INFO", "WARN", "ERROR")


def check_init_arguments(given: Mapping[str, Any], integration: str) -> None:
    """Raise `ConfigurationError` for arguments that `wandb.init` would not accept; it names the `integration`."""
    unknown = [name for name in given if name not in _COMMON_INIT_ARGUMENTS]
    if unknown:
        _check_against_signature(unknown, integration)
    if given.get("mode") == "shared":
        raise ConfigurationError(
            f"{integration} was given mode='shared', which is W&B's switch for one writer. Pass run_mode='shared': it "
            "sets W&B's mode, labels and primary on every rank."
        )
    if given.get("id") is not None:
        check_id(given["id"], f"id={given['id']!r} given to {integration}")


def _check_against_signature(unknown: list[str], integration: str) -> None:
    import wandb

    for name in unknown:
        if name in LIMIT_NAMES:
            raise ConfigurationError(
                f"{integration} got the argument {name!r}, which is one of the limits. Pass "
                f"limits=dist_wandb.Limits({name}=...)."
            )
    parameters = inspect.signature(wandb.init).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in unknown:
        if name in OPTION_NAMES:
            raise ConfigurationError(
                f"{integration} got the argument {name!r}, which belongs to dist_wandb, not to wandb.init. Give it "
                "to the constructor of the logger or tracker, or to dist_wandb.init."
            )
        if name not in parameters:
            nearest = difflib.get_close_matches(name, [*parameters, *OPTION_NAMES, *LIMIT_NAMES], n=1)
            hint = f"Did you mean {nearest[0]!r}?" if nearest else "See the documentation of wandb.init."
            raise ConfigurationError(f"{integration} got the argument {name!r}, which wandb.init does not know. {hint}")


def check_config(given: Mapping[str, Any]) -> None:
    """Raise the errors of wandb for a config that `wandb.init` cannot read, such as a file that does not exist."""
    config, without, only = (given.get(name) for name in ("config", "config_exclude_keys", "config_include_keys"))
    config = plain(config or {})
    if not isinstance(config, Mapping) or (without and only):
        import wandb

        helper: Any = getattr(wandb, "helper", None)  # not visible to type checkers
        if helper is not None:
            helper.parse_config(config, exclude=without, include=only)


def check_alert(level: Any, wait_duration: Any) -> None:
    """Raise the errors that `wandb.Run.alert` raises for these arguments."""
    if getattr(level, "value", level or "INFO") not in _ALERT_LEVELS:
        raise ValueError("level must be one of 'INFO', 'WARN', or 'ERROR'")
    if wait_duration and not isinstance(wait_duration, (int, float, timedelta)):
        raise TypeError("wait_duration must be an int, float, or datetime.timedelta")


def check_id(run_id: object, origin: str) -> str:
    """Return `run_id` if W&B accepts it; raise `ConfigurationError`, which shows its `origin`, otherwise."""
    if len(origin) > _SHOWN_OF_AN_ORIGIN:
        origin = f"{origin[:_SHOWN_OF_AN_ORIGIN]}…"
    if not isinstance(run_id, str):
        raise ConfigurationError(f"{origin} is {type(run_id).__name__}, but a run id is text. Pass a str.")
    if not run_id or run_id != run_id.strip():
        raise ConfigurationError(f"{origin} is empty, or has white space around it, which W&B refuses in run ids.")
    bad = [character for character in _FORBIDDEN_IN_IDS if character in run_id]
    if bad:
        proposal = re.sub(f"[{re.escape(_FORBIDDEN_IN_IDS)}]", "-", run_id)
        raise ConfigurationError(
            f"{origin} has {' and '.join(map(repr, bad))}, which W&B refuses in run ids. Use for example "
            f"{proposal[:_LONGEST_ID]!r}."
        )
    unprintable = sorted({character for character in run_id if not character.isprintable()})
    if unprintable:
        raise ConfigurationError(
            f"{origin} has {' and '.join(map(ascii, unprintable[:3]))}, which cannot be printed. "
            "Use letters and digits."
        )
    if len(run_id) > _LONGEST_ID or len(run_id.encode()) > _LONGEST_ID_IN_BYTES:
        raise ConfigurationError(
            f"{origin} has {len(run_id)} characters ({len(run_id.encode())} bytes), but a run id may have "
            f"{_LONGEST_ID} ({_LONGEST_ID_IN_BYTES} bytes) at most. Shorten it."
        )
    if run_id in (".", ".."):
        raise ConfigurationError(f"{origin} names a directory, but W&B names files after the run id. Use another id.")
    return run_id
