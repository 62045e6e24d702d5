"""W&B's settings outside of any run, and the files that they are read from."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.wandb_files.small_files import LIMIT

if TYPE_CHECKING:
    import wandb


def client_settings() -> wandb.Settings:
    """W&B's settings outside of any run, which it reads once in a process.

    Raises:
        ConfigurationError: A settings file of the current directory is not a regular file of a few kilobytes.
    """
    import wandb

    check_workspace()
    return wandb.setup().settings


def check_workspace() -> None:
    """Refuse a settings file of the current directory that would block wandb for ever, or exhaust the memory.

    Raises:
        ConfigurationError: It is a pipe, a device or the like, or too large.
    """
    for place in workspace_settings():
        with suppress(OSError):  # as a rule it does not exist
            found = place.stat()  # a link to a file is fine, as for wandb
            if not stat.S_ISREG(found.st_mode) or found.st_size > LIMIT:
                raise ConfigurationError(
                    f"{place}, which W&B reads its settings from, is not a regular file of at most {LIMIT} bytes. "
                    "Remove it, or start from another directory."
                )


def workspace_settings() -> list[Path]:
    """The paths where wandb may find settings of the current directory, even if `WANDB_DIR` names another one."""
    return [Path(directory, "settings").absolute() for directory in (".wandb", "wandb")]


def users_settings() -> list[Path]:
    """The user's own settings files, which belong to no project. Older versions of wandb know only the second."""
    directories = (os.environ.get("WANDB_CONFIG_DIR"), "~/.config/wandb")
    with suppress(RuntimeError):  # there is no home directory
        return [Path(directory).expanduser() / "settings" for directory in directories if directory]
    return []


def own_entities() -> frozenset[str]:
    """The owners of runs that the user has named: by `WANDB_ENTITY`, or in the user's own settings file.

    An owner named in a settings file of the current directory does not count: that file may be a stranger's.
    """
    named = [setting_in(path, "entity", Path.read_bytes) for path in users_settings()]
    return frozenset(filter(None, (os.environ.get("WANDB_ENTITY"), *named)))


def default_entity() -> str | None:
    """The owner of runs that name none, whoever has set it; see `own_entities` for those that the user has set."""
    try:
        entity: str | None = client_settings().entity
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_values(error)) from None
    return entity


def setting_in(path: Path, name: str, read: Callable[[Path], bytes]) -> str | None:
    """The value of a setting in a settings file of W&B's, parsed as wandb does; `None` if it has none."""
    parser = ConfigParser()
    try:
        parser.read_string(read(path).decode("utf-8"))
        return parser.get("default", name, fallback=None)
    except (OSError, ValueError, ParserError, ReadError):
        return None


def without_values(error: Exception) -> str:
    """The message of an error on one line, without the values that pydantic repeats: they may be secrets."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return one_line(error)
    complaints = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in errors())
    return f"W&B refuses its settings (WANDB_*, settings=, its settings files): {'; '.join(complaints)}"


def one_line(error: BaseException) -> str:
    """The message of an error on one line; its kind, if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
