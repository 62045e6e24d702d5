"""The environment of wandb's own commands that read and upload files, and where runs usually lie."""

from __future__ import annotations

import os
from pathlib import Path

_SEARCH_PATHS = frozenset({"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"})


def reader_environment(directory: Path) -> dict[str, str]:
    """Make the environment for ``wandb leet inspect`` of a file that may come from a stranger.

    wandb must run only installed code, contact no server, and write only below `directory`. Reading a file needs none
    of the user's settings for W&B, so none is passed on.

    Args:
        directory: The working directory of the command, as `small_files.private_directory` makes it.

    Returns:
        A changed copy of this process's environment.
    """
    environment = {name: value for name, value in own_environment().items() if not name.startswith("WANDB_")}
    state = directory / "state"
    (state / "wandb").mkdir(parents=True, exist_ok=True)  # else wandb's command appends to a log in the shared /tmp
    directories = ("TMPDIR", "WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    # Either of the last two disables telemetry of wandb's own process.
    return {
        **environment,
        **dict.fromkeys(directories, str(state)),
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_MODE": "offline",
        "GOGC": "400",  # a sixth less time of the processor, for 83 MB in place of 55
        "GOMEMLIMIT": "256MiB",  # above it collects as often as it has to: the reader has a limit
    }


def own_environment() -> dict[str, str]:
    """A copy of this process's environment for a Python that imports nothing from its working directory."""
    environment = {
        **os.environ,
        "PYTHONSAFEPATH": "1",
    }  # ignored by Python 3.10, which needs an empty working directory
    for name in _SEARCH_PATHS & environment.keys():
        entries = environment.pop(name).split(os.pathsep)
        absolute = [
            entry for entry in entries if Path(entry).is_absolute()
        ]  # an empty entry means the working directory
        if absolute:
            environment[name] = os.pathsep.join(absolute)
    return environment


def usual_directories() -> list[Path]:
    """The existing directories that runs are usually written to, absolute ones and such below the current directory.

    These are W&B's (``$WANDB_DIR``, else the current directory, with ``wandb`` in it), and that of Lightning's loggers.
    """
    given = os.environ.get("WANDB_DIR")
    places = [Path(given or ".", "wandb"), Path("wandb"), Path("lightning_logs")]
    return [place for place in dict.fromkeys(places) if place.is_dir()]
