"""Names of wandb's module that this package hands on: as they are there at that moment, so nothing is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def of_wandb(name: str) -> Any:
    """The attribute of wandb's module.

    Raises:
        AttributeError: It has none of this name.
    """
    import wandb

    try:
        return getattr(wandb, name)
    except AttributeError:
        raise AttributeError(
            f"module 'dist_wandb' has no attribute {name!r}, and wandb {wandb.__version__} has none either"
        ) from None


def has_run() -> bool:
    """Whether ``wandb.run`` is a run in this process."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


def of_its_run(name: str, why_not: Callable[[], str]) -> Callable[..., Any]:
    """The function of wandb's that acts on the run which ``wandb.run`` is.

    Args:
        name: Its name.
        why_not: Explains why this package knows no run.

    Raises:
        wandb.Error: There is no such run; as wandb does.
    """
    if not has_run():
        import wandb

        raise wandb.Error(f"You must call wandb.init() before wandb.{name}(). {why_not()}")
    function: Callable[..., Any] = of_wandb(name)
    return function
