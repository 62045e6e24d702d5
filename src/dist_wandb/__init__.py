"""Weights & Biases logging for distributed PyTorch training.

``DistWandbLogger`` for Lightning, ``DistWandbTracker`` for Accelerate, ``init`` for plain PyTorch. Importing this
package imports neither torch nor wandb nor a framework: public names are loaded at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dist_wandb._version import __version__

if TYPE_CHECKING:
    from dist_wandb.accelerate import DistWandbTracker as DistWandbTracker
    from dist_wandb.decorator import wandb_init
    from dist_wandb.errors import (
        ConfigurationError,
        DistWandbError,
        MissingExtraError,
        ReadError,
        RendezvousError,
        TopologyError,
        UnavailableError,
        UnsupportedVersionError,
        UploadError,
    )
    from dist_wandb.lightning import DistWandbLogger as DistWandbLogger
    from dist_wandb.payloads.media.gathers import gathered
    from dist_wandb.runs.null_run import NullRun
    from dist_wandb.session.api import get_run, init
    from dist_wandb.session.session import Session
    from dist_wandb.settings.limits import Limits
    from dist_wandb.settings.plan import RunPlan, plan_run
    from dist_wandb.topology.model import Topology

# Without the integrations for the frameworks: `import *` must work where none is installed.
__all__ = [
    "ConfigurationError",
    "DistWandbError",
    "Limits",
    "MissingExtraError",
    "NullRun",
    "ReadError",
    "RendezvousError",
    "RunPlan",
    "Session",
    "Topology",
    "TopologyError",
    "UnavailableError",
    "UnsupportedVersionError",
    "UploadError",
    "__version__",
    "gathered",
    "get_run",
    "init",
    "plan_run",
    "wandb_init",
]

_ROOMS = {
    "DistWandbLogger": "lightning",
    "DistWandbTracker": "accelerate",
    "Limits": "settings.limits",
    "NullRun": "runs.null_run",
    "RunPlan": "settings.plan",
    "Session": "session.session",
    "Topology": "topology.model",
    "gathered": "payloads.media.gathers",
    "get_run": "session.api",
    "init": "session.api",
    "plan_run": "settings.plan",
    "wandb_init": "decorator",
    **dict.fromkeys(
        (
            "ConfigurationError",
            "DistWandbError",
            "MissingExtraError",
            "ReadError",
            "RendezvousError",
            "TopologyError",
            "UnavailableError",
            "UnsupportedVersionError",
            "UploadError",
        ),
        "errors",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "log":
        raise AttributeError("module 'dist_wandb' has no attribute 'log'. Use dist_wandb.get_run().log")
    if name not in _ROOMS:
        raise AttributeError(f"module 'dist_wandb' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dist_wandb.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})
