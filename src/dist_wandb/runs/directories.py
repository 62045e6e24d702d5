"""Directories used by W&B and dist_wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dist_wandb.runs.requested import user_setting


def artifact_staging() -> Path:
    """Return the directory in which W&B keeps files of artifacts until they are uploaded."""
    import wandb

    return Path(wandb.env.get_data_dir()).absolute() / "artifacts" / "staging"


def state_directory() -> Path:
    """Return the directory for the state of this user's uploads: ``$XDG_STATE_HOME/dist-wandb``."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "")
    # According to the XDG base directory specification, a relative path in the variable is ignored.
    return (path if path.is_absolute() else Path("~/.local/state").expanduser()) / "dist-wandb"


def runtime_directory() -> Path | None:
    """Return the directory for this user's sockets, ``$XDG_RUNTIME_DIR``; `None` if it is not a directory."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or "")
    return path if path.is_absolute() and path.is_dir() else None


def wandb_directory(init_arguments: Mapping[str, Any]) -> Path:
    """Return the directory that contains the run directories of a job."""
    root = init_arguments.get("dir") or user_setting(init_arguments, "root_dir") or os.environ.get("WANDB_DIR") or "."
    return Path(root) / "wandb"
