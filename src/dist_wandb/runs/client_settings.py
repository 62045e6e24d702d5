"""W&B's settings outside of any run, the files that contain them, and what else the environment names: directories."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.wandb_files.small_files import LIMIT, read_small

if TYPE_CHECKING:
    import wandb

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


def client_settings() -> wandb.Settings:
    """Return W&B's settings outside of any run, which W&B reads once; ConfigurationError if wandb refuses them."""
    import wandb

    check_workspace()
    try:
        return wandb.setup().settings
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_values(error)) from None


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


def own_entities() -> frozenset[str]:
    """Return the owners of runs that the user has set: by `WANDB_ENTITY`, or in the user's own settings file."""
    # A settings file of the current directory does not count: it may be a stranger's.
    return frozenset(filter(None, (os.environ.get("WANDB_ENTITY"), *users_values("entity").values())))


def users_values(name: str) -> dict[str, str]:
    """Return a setting by path, from the user's own files that have it. Older versions of wandb read only the last."""
    directories = filter(None, (os.environ.get("WANDB_CONFIG_DIR"), "~/.config/wandb"))
    with suppress(RuntimeError):  # there is no home directory
        paths = [Path(directory).expanduser() / "settings" for directory in directories]
        return _values(name, paths, Path.read_bytes)  # they may be links
    return {}


def workspace_values(name: str) -> dict[str, str]:
    """Return a setting by path, from the current directory's files that have it: they may be a stranger's."""
    return _values(name, workspace_settings(), read_small)


def _values(name: str, paths: Iterable[Path], read: Callable[[Path], bytes]) -> dict[str, str]:
    found = {}
    for path in paths:
        parser = ConfigParser()  # as wandb parses them
        with suppress(OSError, ValueError, ParserError, ReadError):
            parser.read_string(read(path).decode("utf-8"))
            if (value := parser.get("default", name, fallback=None)) is not None:
                found[str(path)] = value
    return found


def without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def artifact_staging() -> Path:
    import wandb

    return Path(wandb.env.get_data_dir()).absolute() / "artifacts" / "staging"


def usual_directories() -> list[Path]:
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
    path = Path(os.environ.get("XDG_STATE_HOME") or "")
    # According to the XDG base directory specification, a relative path in the variable is ignored.
    return (path if path.is_absolute() else Path("~/.local/state").expanduser()) / "dist-wandb"


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
    return " ".join(str(error).split()) or type(error).__name__
