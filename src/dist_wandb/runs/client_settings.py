"""W&B's settings outside of any run, the files that contain them, the server that they name, and directories.

W&B also reads the server from ``wandb/settings`` in the current directory, with precedence over the user's own file,
and sends the key there, so the author of that directory could choose who gets it. Hence one rule for all commands that
send the key: it goes to a server that the *user* has named (by `WANDB_BASE_URL`, the user's own settings file, W&B's
default, or a key for that host in the user's netrc), never in clear text over a network, unless the user names that
very server on the command line (`TRUST_OPTION`). Any other source of settings, also one unknown to this module, counts
as a stranger's. ``doctor`` and ``sync`` refuse such a server; a training, which users normally start in a directory of
their own, warns once.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ParserError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from dist_wandb.errors import ConfigurationError, ReadError
from dist_wandb.wandb_files.small_files import LIMIT, read_small

if TYPE_CHECKING:
    import wandb

TRUST_OPTION = "--trust-server"
"""Option of all commands that allows the API key to go to a server; its value is the server's address."""

_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")  # RFC 3986
_PORTS = {"http": 80, "https": 443}
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
    import wandb

    check_workspace()
    try:
        return wandb.setup().settings  # read once by W&B, outside of any run
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_values(error)) from None


def settings_here(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return W&B's settings in this process, by name, with given values, without starting W&B's own process."""
    import wandb

    servers = [*users_values("base_url").values(), *workspace_values("base_url").values()]
    with suppress(Exception):  # `wandb.init`, on the rank with the run, reports what is wrong
        settings: Any = wandb.Settings()
        settings.update_from_dict({"base_url": servers[-1] if servers else None})
        settings.update_from_env_vars(dict(os.environ))
        settings.update_from_system_environment()
        settings.update_from_dict(dict(values))
        return dict(settings.model_dump())
    return {}


def check_workspace() -> None:
    # A pipe would block wandb forever.
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
    # A settings file of the current directory does not count: it may be a stranger's.
    return frozenset(filter(None, (os.environ.get("WANDB_ENTITY"), *users_values("entity").values())))


def users_values(name: str) -> dict[str, str]:  # by path, from the user's own files
    directories = filter(None, (os.environ.get("WANDB_CONFIG_DIR"), "~/.config/wandb"))
    with suppress(RuntimeError):  # there is no home directory
        paths = [Path(directory).expanduser() / "settings" for directory in directories]
        return _values(name, paths, Path.read_bytes)  # they may be links
    return {}


def workspace_values(name: str) -> dict[str, str]:  # by path
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
    try:
        yield
    except ValueError as error:
        if refusal := _refusal(error):
            raise refusal from None  # pydantic repeats the values, such as a password
        raise


def without_values(error: Exception) -> str:
    return str(_refusal(error) or one_line(error))  # pydantic repeats values, which may be secrets


def _refusal(error: Exception) -> ConfigurationError | None:  # `None` if it is none of pydantic's
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return None
    problems = "; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in errors())
    return ConfigurationError(
        f"W&B refuses its settings: {problems}. Correct them where they are set: in arguments, such as settings=, in "
        "WANDB_* variables, or in W&B's settings files."
    )


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__  # for the middle of a sentence


def inherits_service() -> bool:
    # The service writes the process id of its owner into the variable.
    owner = re.match(r"\d+-(\d+)-", os.environ.get("WANDB_SERVICE", ""))
    return owner is not None and int(owner[1]) != os.getpid()


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """The server that receives runs."""

    url: str = field(repr=False)  # with its password, if any: for connections only, never for output
    shown: str  # without user name and password
    source: str  # of the address, for messages: a variable, a file
    refusal: str = ""  # why the API key may not go there, and what the user can do; empty if it may
    key: str | None = field(default=None, repr=False)  # that wandb would send
    key_from: str | None = None


def destination(trusted: str | None = None) -> Destination:
    # Contacts no server. `trusted` is the address that the user has allowed. With a `refusal`, neither the key nor runs
    # may go there.
    settings = client_settings()
    url = str(settings.base_url)
    if not is_address(url):
        raise ConfigurationError(
            "W&B's settings name a server by an ambiguous address: it has several '@', or characters that an address "
            "must not have. Check WANDB_BASE_URL, and base_url in wandb/settings."
        )
    source, is_users = _source_of(url)
    key, key_from, is_hosts = _in_netrc(without_password(url))
    # Whether the key that wandb would send is the key for this very host in the user's netrc.
    has_own_key = not (settings.api_key or settings.identity_token_file) and is_hosts
    if settings.api_key:
        in_environment = settings.api_key == os.environ.get("WANDB_API_KEY")
        key, key_from = settings.api_key, "WANDB_API_KEY" if in_environment else "a settings file of W&B's"
    is_named = is_users or (has_own_key and urlsplit(url).scheme == "https")
    refusal = refusal_of(url, source, is_named=is_named, trusted=trusted)
    return Destination(url, without_password(url), source, refusal, key, key_from)


def refusal_of(url: str, source: str, *, is_named: bool, trusted: str | None = None) -> str:
    # `is_named`: the user has named the server. `trusted` is the address that the user has allowed by `TRUST_OPTION`.
    shown = without_password(url)
    is_open = urlsplit(url).scheme != "https" and not is_loopback(url)  # data can be read on the way
    if (is_named and not is_open) or (trusted is not None and is_same_server(trusted, url)):
        return ""
    if is_named:
        why = (
            f"The API key is not sent to {shown} (from {source}): over plain http, anyone on the network path could "
            "read it."
        )
        otherwise = "Otherwise, use an https address."
    else:
        why = (
            f"The server {shown} is named by {source} alone, not by you, so the API key is not sent there"
            f"{', and it would go over plain http' if is_open else ''}."
        )
        otherwise = "Otherwise, remove base_url from that file, or set WANDB_BASE_URL to your server."
    answer = f" {TRUST_OPTION} names another server, {without_password(trusted)}." if trusted is not None else ""
    return f"{why}{answer} If you trust it, pass {TRUST_OPTION} {shlex.quote(shown)}. {otherwise}"


def _source_of(url: str) -> tuple[str, bool]:
    """Return the source of the server that wandb uses, and whether it is known to be the user's."""
    import wandb

    own = users_values("base_url")
    default = None if any(own.values()) else str(wandb.Settings.model_fields["base_url"].default)
    users = {"WANDB_BASE_URL": os.environ.get("WANDB_BASE_URL"), **own, "W&B's default": default}
    for is_users, sources in ((True, users), (False, workspace_values("base_url"))):
        for source, named in sources.items():
            with suppress(Exception):  # wandb's validation raises more than pydantic's errors
                if named and is_same_server(str(wandb.Settings(base_url=named).base_url), url):  # it rewrites some
                    return source, is_users
    return "wandb's settings", False


def _in_netrc(url: str) -> tuple[str | None, str | None, bool]:  # the key, its file, and whether it is this host's
    parts = urlsplit(url)
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            hosts = netrc(Path(path).expanduser()).hosts
            for name in (parts.netloc, parts.hostname, "default"):  # newer versions of wandb include the port
                if name in hosts:
                    return hosts[name][2], path, name != "default"
    return None, None, False


# --- addresses --------------------------------------------------------------------------------------------------------


def is_address(url: str) -> bool:
    """Return whether this is the address of a server that all URL parsers read in the same way."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # a port that is not a number, a malformed IPv6 address
        return False
    # Parsers disagree about a backslash, white space and several "@", and thus about the host: the connection could go
    # to another host than the one that was checked.
    is_unambiguous = _CHARACTERS.fullmatch(url) is not None and parts.netloc.count("@") <= 1
    return is_unambiguous and parts.scheme in _PORTS and bool(parts.hostname)


def is_same_server(one: str, other: str) -> bool:
    """Return whether two addresses, ignoring user names and passwords, refer to the same server."""
    if one.rstrip("/") == other.rstrip("/"):
        return True
    return is_address(one) and is_address(other) and _location(one) == _location(other)


def is_loopback(url: str) -> bool:
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _location(url: str) -> tuple[str, str, int, str]:
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    return parts.scheme, host, parts.port or _PORTS[parts.scheme], parts.path.rstrip("/")
