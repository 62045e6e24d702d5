"""Which server W&B's client would connect to, which source names it, and whether it receives the API key.

W&B also reads the server from ``wandb/settings`` in the current directory, with precedence over the user's own file,
and sends the key there. `destination` trusts only servers that the *user* names (environment, own settings file,
default). Any other source of settings, also one unknown to this module, counts as a stranger's. ``doctor`` and ``sync``
refuse such a server; a training, which users normally start in a directory of their own, warns once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dist_wandb.errors import ConfigurationError
from dist_wandb.notices import Notices
from dist_wandb.runs import requested
from dist_wandb.runs.client_settings import (
    client_settings,
    setting_in,
    users_settings,
    without_values,
    workspace_settings,
)
from dist_wandb.runs.destination import Destination, is_address, is_same_server, refusal_of, without_password
from dist_wandb.runs.requested import user_setting
from dist_wandb.runs.wandb_process import inherits_service
from dist_wandb.wandb_files.small_files import read_small

if TYPE_CHECKING:
    import wandb

    from dist_wandb.runs.destination import Origin
    from dist_wandb.runs.requested import Mode

_log = logging.getLogger("dist_wandb")

# Settings that can expose the key on its way to the right server.
_TRANSPORT_SETTINGS = ("insecure_disable_ssl", "http_proxy", "https_proxy", "x_extra_http_headers")
_notices = Notices()


@dataclass(frozen=True)
class Setup:
    """How wandb is set up in this environment."""

    mode: Mode | None  # of `wandb.init`; `None` if it would raise
    problem: str  # why it would raise; empty otherwise
    server: Destination | None  # `None` if `wandb.init` would raise
    entity: str | None  # owner of new runs, if set
    project: str | None  # project of new runs, if set
    key: str | None = field(repr=False)
    key_from: str | None
    inherits_service: bool  # whether this process would use the wandb process of another process


def setup(trusted: str | None = None) -> Setup:
    """Determine how wandb is set up here, without opening a run or contacting a server. `trusted` gets the key."""
    try:
        mode, settings = requested.mode({}), client_settings()
        server = destination(trusted=trusted)
    except Exception as error:  # noqa: BLE001  # ours, pydantic's, or what an inherited WANDB_SERVICE leads to
        return Setup(None, without_values(error), None, None, None, None, None, inherits_service())
    key, key_from = _api_key(settings, server.shown)
    return Setup(mode, "", server, settings.entity, settings.project, key, key_from, inherits_service())


def destination(init_arguments: Mapping[str, Any] | None = None, *, trusted: str | None = None) -> Destination:
    """Determine which server W&B's client would connect to, its source, and whether the API key may go there.

    If the `refusal` of the result is not empty, neither the key nor runs may go there. Raises `ConfigurationError` if
    wandb refuses its settings, or the address is ambiguous. Contacts no server. The rule is that of `destination`.
    """
    try:
        settings = client_settings()
    except Exception as error:  # noqa: BLE001  # such as what an inherited WANDB_SERVICE leads to
        raise ConfigurationError(without_values(error)) from None
    given = user_setting(init_arguments or {}, "base_url")
    url = str(given or settings.base_url)
    if not is_address(url):
        raise ConfigurationError(
            "W&B's settings name a server by an ambiguous address: it has several '@', or characters that an address "
            "must not have. Check WANDB_BASE_URL, and base_url in wandb/settings."
        )
    origin: Origin
    origin, source = ("argument", "settings=") if given else _who_named(url)
    # Whether the key that wandb would send is the key for this very host in the user's netrc.
    names = () if settings.api_key or settings.identity_token_file else _names_in_netrc(without_password(url))
    has_own_key = any(name in names and name != "default" for _, hosts in _netrcs() for name in hosts)
    refusal = refusal_of(url, origin, source, has_own_key=has_own_key, trusted=trusted)
    return Destination(url, without_password(url), origin, source, refusal)


def warn_of_workspace(init_arguments: Mapping[str, Any]) -> None:
    """Warn once if only the current directory's settings decide who gets the API key: a stolen one stays stolen."""
    paths = [path for path in workspace_settings() if path.exists()]
    if not paths:
        return
    found = []
    with suppress(ConfigurationError):  # wandb.init raises it
        if requested.mode(init_arguments) != "online":
            return
        server = destination(init_arguments)
        if server.origin == "workspace settings" and not server.takes_key:
            found.append(f"base_url ({server.shown})")
        for name in _TRANSPORT_SETTINGS:
            if user_setting(init_arguments, name) is None and f"WANDB_{name.upper()}" not in os.environ:
                own = {setting_in(path, name, Path.read_bytes) for path in users_settings()}
                if any(setting_in(path, name, read_small) not in {None, *own} for path in paths):
                    found.append(name)
    if found and _notices.is_first("workspace"):
        _log.warning(
            "dist_wandb: %s of %s decides where your runs and your API key go, and your own settings do not name it. "
            "If that file is not yours, end the job and create a new key. If it is, set the same value in the "
            "environment (WANDB_BASE_URL) or in your own settings file, and this warning will not appear again.",
            " and ".join(found),
            " and ".join(map(str, paths)),
        )


def _who_named(url: str) -> tuple[Origin, str]:
    """Return the origin and source of the server that wandb uses. Only sources known to be the user's count as such."""
    import wandb

    in_environment = os.environ.get("WANDB_BASE_URL")
    if in_environment and _is_read_as(in_environment, url):
        return "environment", "WANDB_BASE_URL"
    own = [(path, setting_in(path, "base_url", Path.read_bytes)) for path in users_settings()]  # may be links
    for path, named in own:
        if named and _is_read_as(named, url):
            return "user settings", str(path)
    default = str(wandb.Settings.model_fields["base_url"].default)
    if not any(named for _, named in own) and is_same_server(default, url):
        return "default", "W&B's default"
    for path in workspace_settings():
        if _is_read_as(setting_in(path, "base_url", read_small) or "", url):
            return "workspace settings", str(path)
    return "elsewhere", "wandb's settings"


def _is_read_as(named: str, url: str) -> bool:
    """Return whether wandb reads a configured address as `url`: it rewrites some."""
    import wandb

    if is_same_server(named, url):
        return True
    try:
        return is_same_server(str(wandb.Settings(base_url=named).base_url), url)
    except Exception:  # noqa: BLE001  # wandb's validation raises more than pydantic's errors
        return False


def _api_key(settings: wandb.Settings, url: str) -> tuple[str | None, str | None]:
    """Return the API key that wandb would send to a server, and its source."""
    if settings.api_key:
        in_environment = settings.api_key == os.environ.get("WANDB_API_KEY")
        return settings.api_key, "WANDB_API_KEY" if in_environment else "a settings file of W&B's"
    for path, hosts in _netrcs():
        for name in (*_names_in_netrc(url), "default"):
            if name in hosts:
                return hosts[name][2], path
    return None, None


def _netrcs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the existing netrc files: path, and logins by host."""
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            yield path, netrc(Path(path).expanduser()).hosts


def _names_in_netrc(base_url: str) -> tuple[str, str]:
    """Return the names under which netrc may have a server's key: newer versions of wandb include the port."""
    parts = urlsplit(base_url)
    return parts.netloc, parts.hostname or ""
