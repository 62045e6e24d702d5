"""W&B's settings outside of any run, and the files that contain them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.wandb_files.small_files import LIMIT

if TYPE_CHECKING:
    import wandb


def client_settings() -> wandb.Settings:
    """Return W&B's settings outside of any run, which W&B reads once; ConfigurationError if they are invalid."""
    import wandb

    check_workspace()
    with hidden_values():
        return wandb.setup().settings


def check_workspace() -> None:
    """Refuse a settings file of the current directory that would block wandb forever (a pipe), or is too large."""
    for path in workspace_settings():
        with suppress(OSError):  # usually it does not exist
            found = path.stat()  # links to files are allowed, as by wandb
            if not stat.S_ISREG(found.st_mode) or found.st_size > LIMIT:
                raise ConfigurationError(
                    f"{path}, which W&B reads its settings from, is not a regular file of at most {LIMIT} bytes. "
                    "Remove it, or start from another directory."
                )


def workspace_settings() -> list[Path]:
    """Return the paths of wandb's settings files for the current directory, even if `WANDB_DIR` names another one."""
    return [Path(directory, "settings").absolute() for directory in (".wandb", "wandb")]


def users_settings() -> list[Path]:
    """Return the user's own settings files, independent of any project. Older versions of wandb read only the last."""
    directories = (os.environ.get("WANDB_CONFIG_DIR"), "~/.config/wandb")
    with suppress(RuntimeError):  # there is no home directory
        return [Path(directory).expanduser() / "settings" for directory in directories if directory]
    return []


def own_entities() -> frozenset[str]:
    """Return the owners of runs that the user has set: by `WANDB_ENTITY`, or in the user's own settings file."""
    # A settings file of the current directory does not count: it may be a stranger's.
    named = [setting_in(path, "entity", Path.read_bytes) for path in users_settings()]
    return frozenset(filter(None, (os.environ.get("WANDB_ENTITY"), *named)))


def default_entity() -> str | None:
    """Return the default owner of runs, from any source; see `own_entities` for owners that the user has set."""
    try:
        entity: str | None = client_settings().entity
    except Exception as error:  # noqa: BLE001  # such as what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_values(error)) from None
    return entity


def setting_in(path: Path, name: str, read: Callable[[Path], bytes]) -> str | None:
    """Return a setting in one of W&B's settings files, parsed as wandb does; `None` if it is not set."""
    parser = ConfigParser()
    try:
        parser.read_string(read(path).decode("utf-8"))
        return parser.get("default", name, fallback=None)
    except (OSError, ValueError, ParserError, ReadError):
        return None


def without_password(url: str) -> str:
    """Return an address without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def artifact_staging() -> Path:
    """Return the directory in which W&B keeps files of artifacts until they are uploaded."""
    import wandb

    return Path(wandb.env.get_data_dir()).absolute() / "artifacts" / "staging"


@contextmanager
def hidden_values() -> Iterator[None]:
    """Replace pydantic's errors about W&B's settings by ours: they repeat the values, such as a password."""
    try:
        yield
    except ValueError as error:
        if refusal := _refusal(error):
            raise refusal from None
        raise


def without_values(error: Exception) -> str:
    """Return the message of an error on one line, without the values that pydantic repeats: they may be secrets."""
    return str(_refusal(error) or one_line(error))


def _refusal(error: Exception) -> ConfigurationError | None:
    """Return an error that names the invalid settings of pydantic's error without their values; `None` for others."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return None
    problems = "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in errors())
    return ConfigurationError(
        f"W&B refuses its settings: {problems}. Correct them where they are set: in arguments, such as settings=, in "
        "WANDB_* variables, or in W&B's settings files."
    )


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line; if it is empty, the error's type."""
    return " ".join(str(error).split()) or type(error).__name__
