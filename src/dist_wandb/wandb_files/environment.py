"""The environment in which wandb's own command reads and uploads files."""

from __future__ import annotations

import os
from pathlib import Path

_SEARCH_PATHS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})


def reader_environment(directory: Path) -> dict[str, str]:
    """The environment in which ``wandb leet inspect`` reads a file that may come from a stranger.

    wandb is to run and read nothing but what is installed, to ask no server, and to write below `directory` alone. None
    of the user's settings for W&B is needed to read a file, so none is handed on.

    Args:
        directory: A directory of this user's alone, where the command is started: `small_files.private_directory`.

    Returns:
        A copy of the environment of this process, changed.
    """
    environment = {name: value for name, value in own_environment().items() if not name.startswith("WANDB_")}
    state = directory / "state"
    (state / "wandb").mkdir(parents=True, exist_ok=True)  # else wandb's command appends to a log in the shared /tmp
    places = ("TMPDIR", "WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    # Either of the two keeps wandb's own process from telling a server of itself.
    return {
        **environment,
        **dict.fromkeys(places, str(state)),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": "offline",
    }


def own_environment() -> dict[str, str]:
    """This process's environment for a Python that takes no code from the directory in which it is started."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # Python 3.10 does not know it: it needs an empty directory
    for name in _SEARCH_PATHS & environment.keys():
        entries = environment.pop(name).split(os.pathsep)
        absolute = [entry for entry in entries if Path(entry).is_absolute()]  # an empty one names that directory, too
        if absolute:
            environment[name] = os.pathsep.join(absolute)
    return environment
