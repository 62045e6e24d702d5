"""The integration with Lightning.

`DistWandbLogger` belongs to the name space of Lightning that the script imports, ``lightning.pytorch`` or
``pytorch_lightning``; `LightningDistWandbLogger` and `PytorchLightningDistWandbLogger` name one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_wandb.lightning.logger import DistWandbLogger as DistWandbLogger

    LightningDistWandbLogger = PytorchLightningDistWandbLogger = DistWandbLogger

__all__ = ["DistWandbLogger", "LightningDistWandbLogger", "PytorchLightningDistWandbLogger"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dist_wandb.lightning import name_spaces

    name_spaces.check_installed("DistWandbLogger")
    from dist_wandb.lightning.logger import DistWandbLogger

    if name == "DistWandbLogger":
        return DistWandbLogger.in_use() if name_spaces.loaded() else DistWandbLogger
    is_short = name.startswith("Pytorch")
    return DistWandbLogger.of(name_spaces.PYTORCH_LIGHTNING if is_short else name_spaces.LIGHTNING)
