"""The `DeviceMesh` of the strategy that a Trainer is setting up.

Lightning asks its loggers for their experiments before it hands them its module, by which they could find the Trainer,
and a logger is not told who uses it. So the Trainer is looked up in the calls that lead here: where Lightning's
functions have no such variable, the unit is all ranks, as if there was no mesh, and tests/e2e/test_meshes.py fails.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

if TYPE_CHECKING:
    from types import FrameType

    from dist_wandb.topology.units import Mesh

MODEL_PARALLEL = frozenset({"tensor_parallel"})
"""Dimensions of the mesh of `ModelParallelStrategy` along which ranks hold parts of one replica of the model."""


def mesh_in_use() -> Mesh | None:
    """The mesh of the Trainer that calls this; `None` without one."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        for name in ("trainer", "self"):
            trainer = frame.f_locals.get(name) if frame.f_globals.get("__name__", "").startswith("lightning.") else None
            if isinstance(trainer, Trainer):
                with suppress(RuntimeError):  # not set up yet
                    return getattr(trainer.strategy, "device_mesh", None)
                return None
        frame = frame.f_back
    return None
