"""Names of wandb's module that this package re-exports: looked up at each use, never cached."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def of_wandb(name: str) -> Any:
    """Return an attribute of wandb's module, or raise an `AttributeError`."""
    import wandb

    try:
        return getattr(wandb, name)
    except AttributeError:
        raise AttributeError(
            f"module 'dist_wandb' has no attribute {name!r}, and wandb {wandb.__version__} has none either"
        ) from None


def has_run() -> bool:
    """Return whether ``wandb.run`` is a run in this process."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None


def of_its_run(name: str, why_not: Callable[[], str]) -> Callable[..., Any]:
    """Return the function of wandb that acts on ``wandb.run``; without a run, raise wandb's error and say why not."""
    if not has_run():
        import wandb

        raise wandb.Error(f"You must call wandb.init() before wandb.{name}(). {why_not()}")
    function: Callable[..., Any] = of_wandb(name)
    return function
