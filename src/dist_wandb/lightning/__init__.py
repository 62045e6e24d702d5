"""The integration with Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_wandb.lightning.logger import DistWandbLogger as DistWandbLogger

__all__ = ["DistWandbLogger"]


def __getattr__(name: str) -> Any:
    if name != "DistWandbLogger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dist_wandb.lightning.logger import DistWandbLogger

    return DistWandbLogger
