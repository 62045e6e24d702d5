"""The arguments that describe a job, in publishable form, for ranks that were given none or other ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from dist_wandb.settings.config_values import encoded, given_values, is_plain
from dist_wandb.settings.config_withheld import MISSING, filled, withheld

_DESCRIBING = ("entity", "project", "name", "notes", "tags", "group", "job_type", "dir", "mode", "resume", "config")


def arguments_for_others(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that describe the job and that JSON can hold, for other ranks."""
    described = {name: init_arguments[name] for name in _DESCRIBING if init_arguments.get(name) is not None}
    if "dir" in described:
        described["dir"] = os.fspath(described["dir"])
    config = described.pop("config", None)
    described = {name: value for name, value in described.items() if is_json(value)}
    if config is not None:
        described["config"] = config if isinstance(config, str) else _plain_part(chosen_config(init_arguments))
    return described


def with_own_secrets(described: Mapping[str, Any], init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a result of `arguments_for_others` from another rank with this rank's own secrets."""
    config = described.get("config")
    if not isinstance(config, dict):
        return dict(described)
    own = chosen_config(init_arguments)
    values = {name: filled(value, own.get(name, MISSING)) for name, value in config.items()}
    return {**described, "config": {name: value for name, value in values.items() if value is not MISSING}}


def _plain_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, without secrets, with tuples as lists; the run's config has the others."""
    values = {name: withheld(name, value, value) for name, value in values.items()}
    return {
        name: value if is_json({name: value}) else encoded(value)
        for name, value in values.items()
        if is_json({name: value}) or is_plain(value)
    }


def chosen_config(init_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument `config` as a dict, without the names that W&B should leave out."""
    values = given_values(init_arguments.get("config"))
    without, only = init_arguments.get("config_exclude_keys"), init_arguments.get("config_include_keys")
    return {name: value for name, value in values.items() if name not in (without or ()) and (not only or name in only)}


def is_json(value: object) -> bool:
    """Return whether JSON can hold a value; tuples become lists."""
    try:
        return bool(json.loads(json.dumps(value)) == value or isinstance(value, (list, tuple)))
    except (TypeError, ValueError):
        return False
