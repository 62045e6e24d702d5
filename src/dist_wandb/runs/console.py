"""wandb's console output."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dist_wandb.runs.requested import user_setting


@contextmanager
def with_warnings_alone(*, on: bool) -> Iterator[None]:
    """Limit wandb to warnings and errors inside the block."""
    if not on:
        yield
        return
    import wandb

    settings = wandb.setup().settings
    wandb.termsetup(settings.model_copy(update={"show_info": False}), None)
    try:
        yield
    finally:
        wandb.termsetup(settings, None)  # as wandb.setup does


def sets_verbosity(init_arguments: Mapping[str, Any]) -> bool:
    """Return whether the user has set the verbosity of wandb."""
    names = ("quiet", "silent", "show_info")
    return any(
        user_setting(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ for name in names
    )


def is_silent() -> bool:
    """Return whether the user has silenced wandb with `WANDB_SILENT`."""
    return os.environ.get("WANDB_SILENT", "").lower() in ("true", "1", "yes")
