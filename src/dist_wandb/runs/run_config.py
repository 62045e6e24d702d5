"""What the config of a W&B run can hold, and which errors are W&B's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


def can_hold(value: object) -> bool:
    """Whether W&B can hold a value in the config of a run. Tried on a config that belongs to no run."""
    import wandb

    kind = _kind_of_config()
    if kind is None or isinstance(value, wandb.Artifact):
        return True
    probe = kind()
    try:
        probe.update({"value": value}, allow_val_change=True)
        json.dumps(probe["value"], default=_json_of_builtin)
    except Exception:  # noqa: BLE001  # values have code of their own, which may raise anything
        return False
    return True


def _kind_of_config() -> type[Any] | None:
    """The class of the configs of runs. The name is public, but wandb hides it from type checkers."""
    import wandb

    return getattr(wandb, "Config", None)


def _json_of_builtin(value: object) -> Any:
    """What W&B makes of built-in objects that JSON does not know."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    if isinstance(value, complex):
        return str(value)
    raise TypeError(type(value).__name__)


def is_wandb_error(error: Exception) -> bool:
    """Whether W&B raised an error on purpose, such as for a config value that may not be changed."""
    import wandb

    return isinstance(error, wandb.Error)


def is_wandb_config(config: object) -> bool:
    """Whether this is the config of a run of wandb's, rather than a mock of one."""
    kind = _kind_of_config()
    return kind is not None and issubclass(type(config), kind)
