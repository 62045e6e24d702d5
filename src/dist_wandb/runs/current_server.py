"""Which server W&B's client would connect to, which source names it, and whether it receives the API key.

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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dist_wandb.errors import ConfigurationError
from dist_wandb.notices import Notices, warn
from dist_wandb.runs import requested
from dist_wandb.runs.client_settings import (
    client_settings,
    users_values,
    without_password,
    workspace_settings,
    workspace_values,
)
from dist_wandb.runs.wandb_private import inherits_service

TRUST_OPTION = "--trust-server"
"""Option of all commands that allows the API key to go to a server; its value is the server's address."""

_notices = Notices()
_CHARACTERS = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")  # RFC 3986
_PORTS = {"http": 80, "https": 443}
# Settings that can expose the key on its way to the right server.
_TRANSPORT_SETTINGS = ("insecure_disable_ssl", "http_proxy", "https_proxy", "x_extra_http_headers")


@dataclass(frozen=True)
class Destination:
    """The server that receives runs."""

    url: str = field(repr=False)  # with its password, if any: for connections only, never for output
    shown: str  # without user name and password
    source: str  # of the address, for messages: a variable, a file
    refusal: str = ""  # why the API key may not go there, and what the user can do; empty if it may

    @property
    def takes_key(self) -> bool:
        return not self.refusal


@dataclass(frozen=True)
class Setup:
    """How wandb is set up in this environment."""

    mode: requested.Mode | None  # of `wandb.init`; `None` if it would raise
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
        mode, settings, server = requested.mode({}), client_settings(), destination(trusted)
    except ConfigurationError as error:
        return Setup(None, str(error), None, None, None, None, None, inherits_service())
    key, key_from, _ = _in_netrc(server.shown)
    if settings.api_key:
        in_environment = settings.api_key == os.environ.get("WANDB_API_KEY")
        key, key_from = settings.api_key, "WANDB_API_KEY" if in_environment else "a settings file of W&B's"
    return Setup(mode, "", server, settings.entity, settings.project, key, key_from, inherits_service())


def destination(trusted: str | None = None) -> Destination:
    """Determine which server W&B's client would connect to, its source, and whether the API key may go there.

    If the `refusal` of the result is not empty, neither the key nor runs may go there. `trusted` is the address that
    the user has allowed. Raises `ConfigurationError` if wandb refuses its settings, or the address is ambiguous.
    Contacts no server.
    """
    settings = client_settings()
    url = str(settings.base_url)
    if not is_address(url):
        raise ConfigurationError(
            "W&B's settings name a server by an ambiguous address: it has several '@', or characters that an address "
            "must not have. Check WANDB_BASE_URL, and base_url in wandb/settings."
        )
    source, is_users = _source_of(url)
    # Whether the key that wandb would send is the key for this very host in the user's netrc.
    has_own_key = not (settings.api_key or settings.identity_token_file) and _in_netrc(without_password(url))[2]
    is_named = is_users or (has_own_key and urlsplit(url).scheme == "https")
    return Destination(url, without_password(url), source, refusal_of(url, source, is_named=is_named, trusted=trusted))


def refusal_of(url: str, source: str, *, is_named: bool, trusted: str | None = None) -> str:
    """Return why the API key may not go to a server, and what to do, as text; empty if it may.

    `is_named`: the user has named the server. `trusted` is the address that the user has allowed by `TRUST_OPTION`.
    """
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


def warn_of_workspace(init_arguments: Mapping[str, Any]) -> None:
    """Warn once if only the current directory's settings decide who gets the API key: a stolen one stays stolen."""
    paths = [path for path in workspace_settings() if path.exists()]
    if not paths:
        return
    found = []
    with suppress(ConfigurationError):  # wandb.init raises it
        if requested.mode(init_arguments) != "online":
            return
        if requested.in_settings(init_arguments, "base_url") is None:
            server = destination()
            if not server.takes_key and server.source in map(str, paths):
                found.append(f"base_url ({server.shown})")
        for name in _TRANSPORT_SETTINGS:
            is_set = requested.in_settings(init_arguments, name) is not None or f"WANDB_{name.upper()}" in os.environ
            if not is_set and set(workspace_values(name).values()) - set(users_values(name).values()):
                found.append(name)
    if found and _notices.is_first("workspace"):
        warn(
            f"{' and '.join(found)} of {' and '.join(map(str, paths))} decides where your runs and your API key go, "
            "and your own settings do not name it. If that file is not yours, end the job and create a new key. If it "
            "is, set the same value in the environment (WANDB_BASE_URL) or in your own settings file, and this warning "
            "will not appear again."
        )


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


def _in_netrc(url: str) -> tuple[str | None, str | None, bool]:
    """Return a server's key in the user's netrc, the path of that file, and whether it is the key of this very host."""
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
