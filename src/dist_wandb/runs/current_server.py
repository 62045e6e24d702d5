"""Which server W&B's client would talk to, who named it, and whether it gets the API key.

W&B also takes the server from ``wandb/settings`` in the current directory, ahead of the user's own file, and sends the
key there. `destination` trusts what the *user* names (environment, own settings file, default), whatever else wandb
goes by: so a source of settings that is not known counts as a stranger's. ``doctor`` and ``sync`` refuse; a training,
which W&B's users start in a directory of their own, warns once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dist_wandb.errors import ConfigurationError
from dist_wandb.notices import Notices
from dist_wandb.runs.client_settings import (
    client_settings,
    setting_in,
    users_settings,
    without_values,
    workspace_settings,
)
from dist_wandb.runs.destination import Destination, is_address, is_same_server, refusal_of, without_password
from dist_wandb.runs.requested import user_setting, wanted_mode
from dist_wandb.runs.wandb_process import inherits_service
from dist_wandb.wandb_files.small_files import read_small

if TYPE_CHECKING:
    import wandb

    from dist_wandb.runs.destination import Origin
    from dist_wandb.runs.requested import Mode

_log = logging.getLogger("dist_wandb")

_ON_THE_WAY = ("insecure_disable_ssl", "http_proxy", "https_proxy", "x_extra_http_headers")  # to the right server
_notices = Notices()


@dataclass(frozen=True)
class Setup:
    """How wandb is set up in this environment.

    Args:
        mode: What `wandb.init` would do: `"online"`, `"offline"` or `"disabled"`; `None` if it would raise.
        problem: Why it would; empty otherwise.
        server: The server, who named it, and whether the API key may go there; `None` if `wandb.init` would raise.
        entity: Owner of new runs, if one is set.
        project: Project of new runs, if one is set.
        key: The API key, if there is one.
        key_from: Where it comes from.
        inherits_service: Whether this process is to use the wandb process of another one.
    """

    mode: Mode | None
    problem: str
    server: Destination | None
    entity: str | None
    project: str | None
    key: str | None = field(repr=False)
    key_from: str | None
    inherits_service: bool


def setup(trusted: str | None = None) -> Setup:
    """Find out how wandb is set up in this environment. Opens nothing, and asks no server.

    Args:
        trusted: The server that the user allows the API key to go to in any case, if any.
    """
    try:
        mode, settings = wanted_mode({}), client_settings()
        server = destination(trusted=trusted)
    except Exception as error:  # noqa: BLE001  # ours, pydantic's, or what an inherited WANDB_SERVICE leads to
        return Setup(None, without_values(error), None, None, None, None, None, inherits_service())
    key, key_from = _api_key(settings, server.shown)
    return Setup(mode, "", server, settings.entity, settings.project, key, key_from, inherits_service())


def destination(init_arguments: Mapping[str, Any] | None = None, *, trusted: str | None = None) -> Destination:
    """Find out which server W&B's client would talk to, who named it, and whether the API key may go there.

    The user names a server by `WANDB_BASE_URL`, in the user's own settings file, or by leaving W&B's default. All other
    sources, above all ``./wandb/settings``, may be a stranger's. A server that only they name gets the key if the
    user's netrc has one for that host, or if the user allows it. No server but one on this host gets it over plain
    http, unless the user allows it. The user allows it with ``--trust-server URL``
    (`dist_wandb.runs.destination.TRUST_OPTION`), the same for all commands. Opens nothing, and asks no server.

    Args:
        init_arguments: Keyword arguments of `wandb.init`, whose `settings` may name a server.
        trusted: The value of ``--trust-server``, if it was given.

    Returns:
        The server. Where `refusal` is not empty, neither the key nor runs may go there.

    Raises:
        ConfigurationError: wandb refuses its settings, or the address is ambiguous.
    """
    try:
        settings = client_settings()
    except Exception as error:  # noqa: BLE001  # pydantic's, or what an inherited WANDB_SERVICE leads to
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
    refusal = refusal_of(url, origin, source, has_own_key=_has_own_key(settings, url), trusted=trusted)
    return Destination(url, without_password(url), origin, source, refusal)


def warn_of_workspace(init_arguments: Mapping[str, Any]) -> None:
    """Warn once of settings of the current directory that decide, by themselves, who gets the API key of an online run.

    wandb reads them, and whoever starts a training in a directory mostly knows it. But a stolen key cannot be recalled.
    """
    places = [place for place in workspace_settings() if place.exists()]
    if not places:
        return
    found = []
    with suppress(ConfigurationError):  # wandb.init raises it
        if wanted_mode(init_arguments) != "online":
            return
        server = destination(init_arguments)
        if server.origin == "workspace settings" and not server.takes_key:
            found.append(f"base_url ({server.shown})")
        found += [name for name in _ON_THE_WAY if _is_from(places, name, init_arguments)]
    if found and _notices.is_first("workspace"):
        _log.warning(
            "dist_wandb: %s of %s decides where your runs and your API key go, and your own settings do not name it. "
            "If that file is not yours, end the job and create a new key. If it is, set the same value in the "
            "environment (WANDB_BASE_URL) or in your own settings file, and this warning will not appear again.",
            " and ".join(found),
            " and ".join(map(str, places)),
        )


def _is_from(places: Iterable[Path], name: str, init_arguments: Mapping[str, Any]) -> bool:
    """Whether a setting is made only by settings files of the current directory."""
    if user_setting(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ:
        return False
    own = {setting_in(path, name, Path.read_bytes) for path in users_settings()}
    return any(setting_in(place, name, read_small) not in {None, *own} for place in places)


def _who_named(url: str) -> tuple[Origin, str]:
    """Who named the server that wandb uses. Only what the user is known to have named counts as the user's."""
    import wandb

    in_environment = os.environ.get("WANDB_BASE_URL")
    if in_environment and _is_read_as(in_environment, url):
        return "environment", "WANDB_BASE_URL"
    own = [(path, setting_in(path, "base_url", Path.read_bytes)) for path in users_settings()]  # links, in one's home
    for path, named in own:
        if named and _is_read_as(named, url):
            return "user settings", str(path)
    default = str(wandb.Settings.model_fields["base_url"].default)
    if not any(named for _, named in own) and is_same_server(default, url):
        return "default", "W&B's default"
    for place in workspace_settings():
        if _is_read_as(setting_in(place, "base_url", read_small) or "", url):
            return "workspace settings", str(place)
    return "elsewhere", "wandb's settings"


def _is_read_as(named: str, url: str) -> bool:
    """Whether wandb reads a written address as `url`: it rewrites some."""
    import wandb

    if is_same_server(named, url):
        return True
    try:
        return is_same_server(str(wandb.Settings(base_url=named).base_url), url)
    except Exception:  # noqa: BLE001  # wandb's validation raises more than pydantic's errors
        return False


def _api_key(settings: wandb.Settings, url: str) -> tuple[str | None, str | None]:
    """The API key that wandb would send to a server, and where it comes from."""
    if settings.api_key:
        in_environment = settings.api_key == os.environ.get("WANDB_API_KEY")
        return settings.api_key, "WANDB_API_KEY" if in_environment else "a settings file of W&B's"
    return _key_in_netrc(url)


def _has_own_key(settings: wandb.Settings, url: str) -> bool:
    """Whether the key that wandb would send is the one that the user's netrc has for this very host."""
    if settings.api_key or settings.identity_token_file:
        return False
    names = _names_in_netrc(without_password(url))
    return any(name in names and name != "default" for _, hosts in _netrcs() for name in hosts)


def _key_in_netrc(base_url: str) -> tuple[str | None, str | None]:
    for path, hosts in _netrcs():
        for name in (*_names_in_netrc(base_url), "default"):
            if name in hosts:
                return hosts[name][2], path
    return None, None


def _netrcs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The netrc files that exist: path, and logins by host."""
    for path in filter(None, (os.environ.get("NETRC"), "~/.netrc", "~/_netrc")):
        with suppress(OSError, RuntimeError, NetrcParseError):
            yield path, netrc(Path(path).expanduser()).hosts


def _names_in_netrc(base_url: str) -> tuple[str, str]:
    """The names under which netrc may have a server's key: newer versions of wandb write the port as well."""
    parts = urlsplit(base_url)
    return parts.netloc, parts.hostname or ""
