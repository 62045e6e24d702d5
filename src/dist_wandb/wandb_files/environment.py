"""The environment of wandb's command that uploads files, and directories that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_SEARCH_PATHS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})
_RUN_VARIABLES = frozenset(
    f"WANDB_{name}"
    for name in (
        *("RUN_ID", "NAME", "NOTES", "TAGS", "RUN_GROUP", "JOB_TYPE", "SWEEP_ID", "RESUME", "SERVICE"),
        *("MODE", "SILENT", "QUIET", "X_LABEL", "X_PRIMARY", "X_UPDATE_FINISH_STATE"),
    )
)
# W&B waits 2 s after the first failure, and twice as long after each further failure: so it gives up after about two
# minutes without a server, instead of two hours. The user may set other limits.
_RETRY_LIMITS = {f"WANDB_X_{client}_RETRY_MAX": "6" for client in ("GRAPHQL", "FILE_STREAM", "FILE_TRANSFER")}


def usual_directories() -> list[Path]:
    """Return the existing directories that W&B and Lightning usually write runs to."""
    given = os.environ.get("WANDB_DIR")
    paths = [Path(given or ".", "wandb"), Path("wandb"), Path("lightning_logs")]
    return [path for path in dict.fromkeys(paths) if path.is_dir()]


def upload_environment(directory: Path, role: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment in which ``wandb sync`` uploads one file, derived from that of this process.

    `role` has the variables of the file's writer, where they are set. W&B's log is in `directory`. Settings of a single
    run (id, name, tags, group, …) are left out, because they belong to another run. Python imports nothing from its
    working directory. Settings files of the current directory are ignored: one that sets a proxy and disables the check
    of certificates could intercept the API key on its way to the right server.
    """
    own = {name: value for name, value in os.environ.items() if name not in _RUN_VARIABLES}
    own["PYTHONSAFEPATH"] = "1"  # Python 3.10 ignores it, and needs an empty working directory
    for name in _SEARCH_PATHS & own.keys():
        entries = own.pop(name).split(os.pathsep)
        absolute = [entry for entry in entries if Path(entry).is_absolute()]  # empty means the working directory
        if absolute:
            own[name] = os.pathsep.join(absolute)
    (directory / "wandb").mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in role.items() if value is not None}
    return {**_RETRY_LIMITS, **own, **given, "WANDB_DIR": str(directory)}


def state_directory() -> Path:
    """Return the directory for the state of this user's uploads: ``$XDG_STATE_HOME/dist-wandb``."""
    path = Path(os.environ.get("XDG_STATE_HOME") or "")
    # According to the XDG base directory specification, a relative path in the variable is ignored.
    return (path if path.is_absolute() else Path("~/.local/state").expanduser()) / "dist-wandb"


def runtime_directory() -> Path | None:
    """Return the directory for this user's sockets, ``$XDG_RUNTIME_DIR``; `None` if it is not a directory."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or "")
    return path if path.is_absolute() and path.is_dir() else None
